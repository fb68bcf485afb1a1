"""A recurrent classifier of sequences.

S. Hochreiter, J. Schmidhuber, "Long short-term memory", 1997. The state after the last position goes to a linear head.
"""

from __future__ import annotations

from torch import Tensor, nn

from bayeslim.io.networks import register_network


class LSTMClassifier(nn.Module):
    """An LSTM and a linear head on its last state."""

    def __init__(self, classes: int, features: int, hidden: int, layers: int, vocabulary: int | None):
        super().__init__()
        self.features = features
        self.embed = None if vocabulary is None else nn.Embedding(vocabulary, features)
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (B, classes) of a batch of sequences.

        Inputs are tokens (B, T), features (B, T, features), or images (B, C, H, W), which are read row by row.
        """
        x = x.flatten(1).unflatten(1, (-1, self.features)) if self.embed is None else self.embed(x)
        outputs, _ = self.lstm(x)
        logits: Tensor = self.fc(outputs[:, -1])
        return logits


@register_network
def lstm(
    classes: int = 10, features: int = 28, hidden: int = 128, layers: int = 1, vocabulary: int | None = None
) -> LSTMClassifier:
    """Build an LSTM classifier; the defaults read MNIST as 28 rows of 28 pixels.

    Args:
        classes: the number of outputs.
        features: numbers at each position, or the width of the embedding where there is a vocabulary.
        hidden: units of the state.
        layers: stacked LSTM layers.
        vocabulary: the number of tokens, where the inputs are token indices; None for numbers.
    """
    return LSTMClassifier(classes, features, hidden, layers, vocabulary)
