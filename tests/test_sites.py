"""Which parameters are random: every form of selection, the report, and three ways to match nothing."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import NoSiteMatched, UnsupportedModel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv1d(1, 2, 3))
        self.encoder_extra = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))


ALL = (
    "scale", "encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias", "encoder.2.weight",
    "encoder.2.bias", "encoder_extra.weight", "encoder_extra.bias", "head.weight", "head.bias",
)  # fmt: skip
WEIGHTS = ("encoder.0.weight", "encoder.2.weight", "encoder_extra.weight", "head.weight")


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("all", ALL),
        ("weights", WEIGHTS),
        ("head", ("head.weight", "head.bias")),
        ("head.weight", ("head.weight",)),
        ("scale", ("scale",)),
        ("encoder", ALL[1:7]),
        ("encoder.0", ("encoder.0.weight", "encoder.0.bias")),
        (r".*\.bias", tuple(n for n in ALL if n.endswith(".bias"))),
        (r"encoder\.\d\.weight", ("encoder.0.weight", "encoder.1.weight", "encoder.2.weight")),
        ("*bias", tuple(n for n in ALL if n.endswith("bias"))),
        ("*coder*", ALL[1:9]),
        ("*coder.?", ALL[1:7]),
        ("enc*[02].weight", ("encoder.0.weight", "encoder.2.weight")),
        ("encoder.*weight", ("encoder.0.weight", "encoder.1.weight", "encoder.2.weight", "encoder_extra.weight")),
        (re.compile(r"HEAD\..*", re.IGNORECASE), ("head.weight", "head.bias")),
        (nn.Linear, ("encoder.0.weight", "encoder.0.bias", *ALL[7:])),
        (nn.modules.conv._ConvNd, ("encoder.2.weight", "encoder.2.bias")),
        (lambda name, p: p.ndim == 2 and p.shape[0] == 2, ("head.weight",)),
        (["head.bias", nn.Conv1d], ("encoder.2.weight", "encoder.2.bias", "head.bias")),
        ({"scale", "head.bias"}, ("scale", "head.bias")),
        (("weights", "head.bias"), (*WEIGHTS, "head.bias")),
        ((n for n in ("scale", "head")), ("scale", "head.weight", "head.bias")),
        (["head", nn.LSTM], ("head.weight", "head.bias")),
    ],
)
def test_selections(selection, names):
    assert bl.sites(Net(), selection).names == names


def test_a_selection_is_a_whole_name_not_a_part():
    assert bl.sites(Net(), "encoder").names == ALL[1:7]  # and not encoder_extra
    with pytest.raises(NoSiteMatched):
        bl.sites(Net(), "coder")


def test_a_slip_among_several_names_is_refused():
    with pytest.raises(NoSiteMatched, match=r'sites names "heat", which none of the 11 .* Closest names: "head"'):
        bl.sites(Net(), ["encoder", "heat"])
    priors = {"heat": bl.priors.Normal(0.1), "all": bl.priors.Normal(1.0)}
    with pytest.raises(NoSiteMatched, match='prior names "heat"'):
        bl.bayesianize(Net(), bl.Variational(), likelihood=bl.likelihoods.Categorical(), prior=priors)


def test_the_report_says_what_and_why():
    model = Net()
    model.head.weight.requires_grad_(False)
    model.register_parameter("index", nn.Parameter(torch.arange(3), requires_grad=False))
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))
    model.register_parameter("none", nn.Parameter(torch.zeros(0, 4)))
    report = bl.sites(model)
    reasons = {site.name: site.reason for site in report}
    assert reasons["head.weight"] == "frozen (requires_grad=False)"
    assert reasons["index"] == "torch.int64 is not a real number type"
    assert reasons["phase"] == "torch.complex64 is not a real number type"
    assert reasons["none"] == "empty"
    assert reasons["head.bias"] == "bias, trained as a point"
    assert reasons["encoder.1.weight"] == "normalisation, trained as a point"
    assert reasons["encoder.0.weight"] == "weight"
    lines = repr(report).splitlines()
    assert lines[0] == "Net: 34 of 70 parameters are random"
    assert len(lines) == 1 + len(report) == 1 + 14
    assert any(re.fullmatch(r"  ~ encoder\.0\.weight +4×3  weight", line) for line in lines)
    assert any(re.fullmatch(r"  = scale +scalar  bias, trained as a point", line) for line in lines)
    assert report.size == 12 + 6 + 16


def test_embeddings_stay_points_by_default_tied_or_not():
    class Language(nn.Module):
        def __init__(self, tied: bool):
            super().__init__()
            self.embed, self.middle, self.out = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
            if tied:
                self.out.weight = self.embed.weight

    for tied, names in ((False, ("middle.weight", "out.weight")), (True, ("middle.weight",))):
        report = bl.sites(Language(tied))
        assert report.names == names
        assert "embedding, trained as a point" in repr(report)
        bnn = bl.bayesianize(Language(tied), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
        assert set(bnn.sites.names) == {*names, "middle.bias"}
        assert "embed.weight" in bl.sites(Language(tied), "all").names
    assert bl.sites(nn.Embedding(5, 3)).names == ("weight",)  # there is nothing else


def test_tied_weights_appear_once_with_their_other_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.out.weight = self.embed.weight
            self.again = self.out

    for selection in ("weights", "out", "again.weight", nn.Linear, nn.Embedding, "embed"):
        report = bl.sites(Tied(), selection)
        assert report.names == ("embed.weight",)
        assert len(report) == 1
        assert report.entries[0].aliases == ("out.weight", "again.weight")
        assert report.size == 15
        assert "also out.weight, again.weight" in repr(report)


def test_nothing_matched_names_what_is_close():
    with pytest.raises(NoSiteMatched) as caught:
        bl.sites(Net(), "encoders.0.weight")
    message = str(caught.value)
    assert "matched none of the 11 parameters of Net" in message
    assert 'Closest names: "encoder.0.weight"' in message
    assert 'Pass sites="all", or print bl.sites(model)' in message
    with pytest.raises(NoSiteMatched, match=r"The first names are scale, encoder\.0\.weight"):
        bl.sites(Net(), lambda name, p: False)
    with pytest.raises(NoSiteMatched, match="sites=GRU matched none"):
        bl.sites(Net(), nn.GRU)


def test_everything_excluded_says_why():
    with pytest.raises(NoSiteMatched, match=r"matched 11 of the 11.*none of them can.*frozen.*requires_grad_\(True\)"):
        bl.sites(Net().requires_grad_(False), "all")


def test_what_was_matched_was_excluded_says_why():
    model = Net()
    model.head.requires_grad_(False)
    with pytest.raises(NoSiteMatched, match=r'sites=.head. matched 2 of the 11.*"head\.weight" is frozen'):
        bl.sites(model, "head")


def test_no_parameters_at_all():
    with pytest.raises(NoSiteMatched, match="ReLU has no parameters"):
        bl.sites(nn.ReLU())


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ("[", "neither a name, a glob nor a regular expression"),
        (3, "sites must be"),
        (None, "sites must be"),
        (["head", 3], "sites must be"),
        (nn.Linear(2, 2), "sites must be"),
        ([], "matched none"),
        ("", "matched none"),
    ],
)
def test_what_is_no_selection_is_refused(selection, words):
    with pytest.raises(NoSiteMatched, match=words):
        bl.sites(Net(), selection)


def test_lazy_modules_are_refused():
    with pytest.raises(UnsupportedModel, match="Call the model once on a batch"):
        bl.sites(nn.Sequential(nn.LazyLinear(3)))


def test_looking_at_sites_changes_nothing():
    model = Net()
    before = [(n, p, p.requires_grad) for n, p in model.named_parameters()]
    bl.sites(model, "all")
    after = [(n, p, p.requires_grad) for n, p in model.named_parameters()]
    assert all(a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in zip(before, after, strict=True))
