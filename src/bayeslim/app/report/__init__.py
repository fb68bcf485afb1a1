"""The report: one HTML page with figures, the numbers behind them, and nothing that needs a network.

A figure is a file: it measures, draws (`plot`) and gives back a `Figure` with its table; `html` makes the page.
"""

from __future__ import annotations

from bayeslim.app.report.figure import Figure, Table
from bayeslim.app.report.overview import Row, measure_rows, overview
from bayeslim.app.report.report import report
from bayeslim.app.report.scores import Scores, predict_all, score_network, score_prediction

__all__ = [
    "Figure",
    "Row",
    "Scores",
    "Table",
    "measure_rows",
    "overview",
    "predict_all",
    "report",
    "score_network",
    "score_prediction",
]
