"""The choice of random parameters, and the reasons for it.

A selection is one of
    "default"                 the method's own default ("all" or "weights") without embeddings;
    "all"                     every trainable floating-point parameter;
    "weights"                 those with two or more dimensions outside normalisation layers (no biases, no norms);
    "fc1.weight", "encoder"   a parameter's or a module's name;
    "encoder.*weight"         a regular expression that matches the whole name (a string or a compiled pattern);
    "*mlp*"                   a glob that matches the whole name of a parameter or module: * stands for any characters,
                              dots too, ? for one, [abc] for one of these;
    nn.Linear                 a module class: the parameters such modules own;
    lambda name, p: ...       a predicate on name and parameter;
or a list of these, which selects the union. Weights shared between modules appear once, under their
first name.

A string is a glob if it has no backslash and a * or ? stands at its beginning or behind a letter, a digit or an
underscore. If it is a valid regular expression too, a name that matches either is selected.

Embeddings stay points by default, because most of their rows are read rarely; only where nothing else is left they are
random. A weight that a layer shares with an embedding counts as an embedding. Select them to make them random:
sites="all" or sites=["weights", nn.Embedding].
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from bayeslim.errors import NoSiteMatched, UnsupportedModel, closest

Selection: TypeAlias = (
    str | re.Pattern[str] | type[nn.Module] | Callable[[str, nn.Parameter], bool] | Iterable["Selection"]
)

NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_GLOB = re.compile(r"(?:^|\w)[*?]")
"""Where a string has a * or ? that is no repetition of a group, a class or any character."""


@dataclass(frozen=True)
class Site:
    """One parameter of a model.

    Attributes:
        name: its name in the model.
        shape: its shape.
        random: whether it gets a posterior.
        reason: why, in words.
        aliases: further names of the same tensor, for tied weights.
    """

    name: str
    shape: tuple[int, ...]
    random: bool
    reason: str
    aliases: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of scalars in it."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Sites:
    """All parameters of a model, which of them are random, and why; prints as a table."""

    model: str
    entries: tuple[Site, ...] = field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The random parameters' names."""
        return tuple(site.name for site in self.entries if site.random)

    @property
    def size(self) -> int:
        """The number of random scalars."""
        return sum(site.size for site in self.entries if site.random)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        total = sum(site.size for site in self.entries)
        width = max((len(site.name) for site in self.entries), default=4)
        lines = [f"{self.model}: {self.size:,} of {total:,} parameters are random"]
        for site in self.entries:
            mark = "~" if site.random else "="
            tied = f"; also {', '.join(site.aliases)}" if site.aliases else ""
            shape = "×".join(map(str, site.shape)) or "scalar"
            lines.append(f"  {mark} {site.name:<{width}}  {shape:>14}  {site.reason}{tied}")
        return "\n".join(lines)


def sites(model: nn.Module, selection: Selection = "default", *, default: str = "weights") -> Sites:
    """Report which parameters of `model` a selection makes random.

    Args:
        model: the network.
        selection: the parameters to make random; "default" is the default of a method without embeddings.
        default: the default of the method: "weights" for `Variational`, "all" for most others.

    >>> print(sites(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))))
    Sequential: 6 of 12 parameters are random
      ~ 0.weight             2×3  weight
      = 0.bias                 2  bias, trained as a point
      = 1.weight               2  normalisation, trained as a point
      = 1.bias                 2  normalisation, trained as a point
    """
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UnsupportedModel(
            f'{type(model).__name__} has lazy parameters without a shape ("{lazy[0]}", ...). '
            "Call the model once on a batch, then make it Bayesian."
        )
    if not callable(selection) and not isinstance(selection, (str, re.Pattern)) and isinstance(selection, Iterable):
        selection = list(selection)
        check_names(model, selection, "sites")
    owners = dict(_owners(model))
    aliases: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    embeddings = {id(p) for names in aliases.values() for n in names for p in _table(owners[n])}
    spared: set[int] = set()
    if isinstance(selection, str) and selection == "default":
        spared, selection = embeddings, default
    matches = matcher(selection)
    entries, excluded = [], []
    for name, p in model.named_parameters():
        names = aliases[id(p)]
        chosen = id(p) not in spared and any(matches(n, p, owners[n]) for n in names)
        random, reason = _verdict(name, p, owners[name], chosen, id(p) in embeddings)
        entries.append(Site(name, tuple(p.shape), random, reason, tuple(n for n in names if n != name)))
        if chosen and not random:
            excluded.append(entries[-1])
    report = Sites(type(model).__name__, tuple(entries))
    if not report.names and spared:  # there is nothing but embeddings
        return sites(model, default)
    if not report.names:
        raise NoSiteMatched(_nothing_matched(report, selection, excluded))
    return report


def usable(model: Any) -> Any:
    """Check that a model can be made Bayesian; unwrap a compiled one.

    Raises:
        UnsupportedModel: for scripted and data-parallel modules, compiled parts of a module, and modules without values
            or with values that are not finite.
    """
    if _is_compiled(model):
        model = model._orig_mod
    if not isinstance(model, nn.Module):
        return model  # refused later, in words for objects that are no modules
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModel("A scripted model takes no other weights. Pass the Python module instead.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UnsupportedModel(
            f"{type(model).__name__} runs copies of a network, which take no other weights. Pass the network inside it "
            "(model.module), and train on several devices with bnn.fit under torchrun."
        )
    for path, module in model.named_modules():
        if _is_compiled(module):
            raise UnsupportedModel(
                f'"{path}" is compiled: torch.compile hides the names of its parameters. Make the plain network '
                f"Bayesian ({path}._orig_mod is the plain module), and compile afterwards."
            )
    check_has_values(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter) or not parameter.is_floating_point():
            continue
        if not bool(torch.isfinite(parameter).all()):
            raise UnsupportedModel(
                f'The model\'s parameter "{name}" holds NaN or infinite values. Initialise it again, or load a '
                "checkpoint from before training failed."
            )
    return model


def check_has_values(model: nn.Module, place: str = "") -> None:
    """Raise if a tensor of a model is on the meta device; `place` says which model."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # tensors of lazy modules are refused by `sites`
        if tensor.is_meta and not isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise UnsupportedModel(
                f'"{name}"{place} is on the meta device and has no values. Call model.to_empty(device="cpu"), and load '
                "or initialise the weights first."
            )


def _is_compiled(module: Any) -> bool:
    """Check whether a module came from torch.compile, without importing the compiler."""
    return type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo")


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Find the module that owns a parameter, and the parameter's name there."""
    *path, leaf = name.split(".")
    module: Any = model
    for part in path:  # faster than `get_submodule`
        module = module._modules[part]
    return module, leaf


def tensor_at(model: nn.Module, name: str) -> Tensor:
    """Return a parameter, or the tensor in its place in a functional call."""
    module, leaf = owner(model, name)
    tensor: Tensor = getattr(module, leaf)
    return tensor


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf in module._parameters:
            yield (f"{path}.{leaf}" if path else leaf), module


def is_norm(module: nn.Module) -> bool:
    """Check for a normalisation layer, by name too: LlamaRMSNorm, T5LayerNorm."""
    return isinstance(module, NORMS) or type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def is_weight(name: str, p: nn.Parameter, module: nn.Module) -> bool:
    """Check whether a parameter is a weight, not a bias or part of a normalisation."""
    return p.ndim >= 2 and not is_norm(module) and not name.rpartition(".")[2].startswith("bias")


def _table(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of an embedding; none for another module.

    An embedding with sparse gradients counts as any weight: Adam cannot train it as a point.
    """
    is_table = isinstance(module, EMBEDDINGS) and not module.sparse
    return list(module.parameters(recurse=False)) if is_table else []


def _verdict(name: str, p: nn.Parameter, module: nn.Module, chosen: bool, embedding: bool) -> tuple[bool, str]:
    what = "normalisation" if is_norm(module) else "weight" if is_weight(name, p, module) else "bias"
    what = "embedding" if embedding else what
    if not p.is_floating_point():
        return False, f"{p.dtype} is not a real number type"
    if not p.requires_grad:
        return False, "frozen (requires_grad=False)"
    if p.numel() == 0:
        return False, "empty"
    if not chosen:
        return False, f"{what}, trained as a point"
    return True, what


def matcher(selection: Selection) -> Callable[[str, nn.Parameter, nn.Module], bool]:
    """Make a test of (name, parameter, owning module) for a selection."""
    if isinstance(selection, str):
        if selection == "all":
            return lambda name, p, module: True
        if selection == "weights":
            return is_weight
        prefix = selection + "."
        patterns = _patterns(selection)
        return lambda name, p, module: (
            name == selection or name.startswith(prefix) or any(one.fullmatch(name) for one in patterns)
        )
    if isinstance(selection, re.Pattern):
        return lambda name, p, module: selection.fullmatch(name) is not None
    if isinstance(selection, type) and issubclass(selection, nn.Module):
        return lambda name, p, module: isinstance(module, selection)
    if callable(selection) and not isinstance(selection, nn.Module):
        predicate = cast("Callable[[str, nn.Parameter], bool]", selection)
        return lambda name, p, module: bool(predicate(name, p))
    if isinstance(selection, Iterable):
        several = [matcher(one) for one in selection]
        return lambda name, p, module: any(match(name, p, module) for match in several)
    raise NoSiteMatched(
        'sites must be "all", "weights", a name, a glob, a regular expression, a module class, a predicate, or a list '
        f"of these. Got {selection!r}."
    )


def _patterns(selection: str) -> list[re.Pattern[str]]:
    """Compile a string as a regular expression, as a glob, or as both."""
    found = []
    if _GLOB.search(selection) and "\\" not in selection:
        whole = fnmatch.translate(selection)
        found = [re.compile(whole), re.compile(fnmatch.translate(f"{selection}.*"))]
    try:
        found.append(re.compile(selection))
    except re.error as error:
        if not found:
            raise NoSiteMatched(
                f"sites={selection!r} is neither a name, a glob nor a regular expression: {error}."
            ) from None
    return found


def check_names(model: nn.Module, selections: Iterable[Any], argument: str) -> None:
    """Raise a `NoSiteMatched` for a name that no parameter has: it is a misspelling."""
    owned = dict(_owners(model))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for one in selections:
        if isinstance(one, str) and one not in ("all", "weights"):
            matches = matcher(one)
            if not any(matches(name, p, owned[name]) for name, p in parameters.items()):
                near = closest(one, {*parameters, *(name.rpartition(".")[0] for name in parameters)} - {""})
                raise NoSiteMatched(
                    f'{argument} names "{one}", which none of the {len(parameters)} parameters of '
                    f"{type(model).__name__} has. " + (f"Closest names: {near}." if near else "Print bl.sites(model).")
                )


def _nothing_matched(report: Sites, selection: Selection, excluded: list[Site]) -> str:
    shown = getattr(selection, "__name__", None) or repr(selection)
    if not len(report):
        return f"{report.model} has no parameters: there is nothing to make Bayesian."
    if excluded:
        return (
            f"sites={shown} matched {len(excluded)} of the {len(report)} parameters of {report.model}, and none of "
            f'them can be random: "{excluded[0].name}" is {excluded[0].reason}. '
            "Call model.requires_grad_(True) if they were frozen by mistake."
        )
    near = closest(selection, (site.name for site in report)) if isinstance(selection, str) else ""
    first = ", ".join(site.name for site in report.entries[:3])
    hint = f"Closest names: {near}. " if near else f"The first names are {first}. "
    return (
        f"sites={shown} matched none of the {len(report)} parameters of {report.model}. {hint}"
        'Pass sites="all", or print bl.sites(model).'
    )
