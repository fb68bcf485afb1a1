"""The demonstration: Bayes by Backprop on the digits that ship with the package, beside the plain network."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.metrics import Classification, ClassificationScores
from bayeslim.progress import progress

EPOCHS = 60


def run(output: Path, seed: int) -> None:
    """Train, compare, and show the most and least certain digits."""
    console = Console()
    started = time.monotonic()
    data = bl.data.load("digits")
    console.print(f"[bold]{data}[/]", highlight=False)
    loader = bl.data.Loader(data.train_x, data.train_y, batch_size=64, seed=seed)
    torch.manual_seed(seed)
    network = bl.zoo.create("mlp", hidden=100, inputs=64)

    plain = train_plain(network, loader)
    bnn = bl.bayesianize(
        network,
        bl.Variational(family=bl.families.DiagonalGaussian(initial_std=0.05), temperature=0.1),
        likelihood=bl.likelihoods.Categorical(),
        prior=bl.priors.Normal(1.0),
    )
    console.print(str(bnn), highlight=False)
    bnn.fit(loader, epochs=EPOCHS, lr=3e-3, lr_schedule="cosine", seed=seed)
    prediction = bl.predict(bnn, data.test_x, samples=64, generator=torch.Generator().manual_seed(seed))
    assert prediction.probs is not None
    with torch.no_grad():
        plain_probs = plain(data.test_x).softmax(-1)

    rows = {"plain network": score(plain_probs, data.test_y), "Bayesian network": score(prediction.probs, data.test_y)}
    console.print(score_table(rows))
    order = prediction.entropy.argsort()
    console.print(certainty_table("The most certain digits", order[:5], prediction, data.test_y))
    console.print(certainty_table("The least certain digits", order.flip(0)[:5], prediction, data.test_y))

    output.mkdir(parents=True, exist_ok=True)
    bl.save(bnn, output / "network")
    console.print(
        f"The trained network is in {output / 'network'}: bl.load({str(output / 'network')!r})", highlight=False
    )
    try:
        from bayeslim.cli.pictures import certainty_picture
    except ModuleNotFoundError as error:
        console.print(f"No picture: {error.name} is not installed. Run: pip install 'bayeslim[report]'")
    else:
        picture = output / "digits.png"
        certainty_picture(picture, data.test_x, data.test_y, prediction, order)
        console.print(f"The picture is {picture}.", highlight=False)
    console.print(f"Done in {time.monotonic() - started:.0f} s.", highlight=False)


def train_plain(network: nn.Module, loader: bl.data.Loader) -> nn.Module:
    """The same architecture, trained as usual."""
    plain = bl.zoo.create(**network.zoo_config)  # type: ignore[arg-type]
    plain.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3, fused=True)
    for _ in progress(range(EPOCHS), "plain network"):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            optimizer.step()
    return plain


def score(probs: Tensor, targets: Tensor) -> ClassificationScores:
    """Test error, NLL and calibration."""
    metric = Classification()
    metric.update(probs, targets)
    return metric.compute()


def score_table(rows: dict[str, ClassificationScores]) -> Table:
    """Scores side by side."""
    table = Table(title="On 500 digits neither has seen", title_justify="left")
    table.add_column("")
    for heading in ("error", "NLL", "calibration error"):
        table.add_column(heading, justify="right")
    for name, scores in rows.items():
        table.add_row(name, f"{100 * scores.error:.1f} %", f"{scores.nll:.3f}", f"{100 * scores.ece:.1f} %")
    return table


def certainty_table(title: str, indices: Tensor, prediction: bl.Prediction, targets: Tensor) -> Table:
    """What the network says of a few digits."""
    assert prediction.probs is not None
    table = Table(title=title, title_justify="left")
    for heading in ("digit", "predicted", "probability", "noise (nats)", "ignorance (nats)"):
        table.add_column(heading, justify="right")
    for i in indices.tolist():
        right = int(prediction.classes[i]) == int(targets[i])
        table.add_row(
            str(int(targets[i])),
            f"{int(prediction.classes[i])}" if right else f"[red]{int(prediction.classes[i])}[/]",
            f"{float(prediction.probs[i].max()):.3f}",
            f"{float(prediction.aleatoric[i]):.3f}",
            f"{float(prediction.epistemic[i]):.3f}",
        )
    return table
