"""Bayesian LoRA: posteriors over the weights of PEFT's adapters alone, and ranks that are cut."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayeslim as bl
from bayeslim import likelihoods
from bayeslim.compact import compaction
from bayeslim.errors import BayeslimError, BayeslimWarning, UnsupportedModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:Of .* steps .* networks are kept:bayeslim.errors.BayeslimWarning",
)

WORDS = 23
METHODS = {
    "IVON": (bl.IVON(), {"epochs": 2}),
    "Variational": (bl.Variational(), {"epochs": 2}),
    "Laplace": (bl.Laplace(), {}),
    "DeepEnsemble": (bl.DeepEnsemble(2), {"epochs": 2}),
    "SGLD": (bl.SGLD(), {"epochs": 4}),
}


@pytest.fixture(scope="module")
def base() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def adapted(base: nn.Module, rank_pattern: dict[str, int] | None = None) -> nn.Module:
    """Add an adapter with random weights in both matrices."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", rank_pattern=rank_pattern or {}
    )
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, WORDS, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


@pytest.mark.parametrize("name", METHODS)
def test_the_weights_of_the_adapter_alone_are_random(name, base, batch):
    method, training = METHODS[name]
    model = adapted(base)
    bnn = bl.bayesianize(model, method, likelihood=likelihoods.Categorical())
    assert set(bnn.sites.names) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in site for site in bnn.sites.names)
    bnn.fit([batch], progress=False, **training)
    for key, value in base.state_dict().items():
        path, _, leaf = key.rpartition(".")
        path = f"{path}.base_layer" if path.endswith(("q_proj", "v_proj")) else path
        assert torch.equal(bnn.mean_network().state_dict()[f"base_model.model.{path}.{leaf}"], value)
    found = bl.predict(bnn, inputs_of(batch), samples=4)
    assert float(found.epistemic.sum()) > 0
    told = batch["labels"] != -100
    scores = bl.metrics.Classification()
    scores.update(found.probs[told], batch["labels"][told])
    nll = -found.probs[told].gather(1, batch["labels"][told][:, None]).log().mean()
    assert scores.compute().nll == pytest.approx(float(nll), rel=1e-4)


def test_a_posterior_is_saved_beside_the_adapter(base, batch, tmp_path):
    bnn = bl.bayesianize(adapted(base), bl.Laplace(), likelihood=likelihoods.Categorical())
    bnn.fit([batch], progress=False)
    bnn.mean_network().save_pretrained(tmp_path)
    wanted = bl.predict(bnn, inputs_of(batch)).probs
    sizes = {}
    for frozen in (True, False):
        folder = tmp_path / f"posterior_{frozen}"
        bl.save(bnn, folder, frozen=frozen)
        sizes[frozen] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, is_trainable=True)
        assert torch.equal(bl.predict(bl.load(folder, model=model), inputs_of(batch)).probs, wanted)
    assert sizes[True] - sizes[False] > 4 * sum(p.numel() for p in base.parameters())
    with pytest.raises(BayeslimError, match="Pass the model"):
        bl.load(folder)
    with torch.no_grad():
        model.get_parameter("base_model.model.lm_head.weight").mul_(2)
    with pytest.warns(BayeslimWarning, match="not those that the posterior was saved with"):
        bl.load(folder, model=model)


def test_ranks_that_are_zero_leave_the_adapter(base, batch, tmp_path):
    own = {r"^model\.layers\.0\.self_attn\.q_proj": 3}
    model = adapted(base, own)
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight[:, 1:] = 0
        model.base_model.model.model.layers[0].self_attn.v_proj.lora_B["default"].weight[:, 2] = 0
    example = inputs_of(batch)
    found = compaction(model, None, example)
    assert "4 of 7 ranks" in found.why
    slim = found.network
    config = slim.peft_config["default"]
    attention = "model.layers.0.self_attn"
    assert config.rank_pattern == {f"{attention}.q_proj": 1, f"{attention}.v_proj": 3}
    assert model.peft_config["default"].rank_pattern == own
    slim.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    wanted = model(**example).logits
    torch.testing.assert_close(loaded(**example).logits, wanted)
    merged = slim.merge_and_unload()
    assert type(merged) is type(base)
    torch.testing.assert_close(merged(**example).logits, wanted)


def test_a_module_saved_with_an_adapter_keeps_the_widths_of_the_base(base, batch, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["mlp"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    own = model.base_model.model.model.layers[0]
    with torch.no_grad():
        own.self_attn.q_proj.lora_B["default"].weight[:, 1].normal_()
        own.mlp.modules_to_save["default"].down_proj.weight[:, :9] = 0
    example = inputs_of(batch)
    found = compaction(model, None, example)
    assert "1 of 2 ranks" in found.why
    assert any("merge_and_unload" in frozen.reason for frozen in found.units.frozen)
    found.network.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    torch.testing.assert_close(loaded(**example).logits, model(**example).logits)
    assert compaction(model.merge_and_unload(), None, example).network.model.layers[0].mlp.up_proj.out_features == 15


def test_blocks_are_cut_after_the_adapter_is_merged(base, batch):
    model = adapted(base)
    with pytest.raises(UnsupportedModel, match="merge_and_unload"):
        bl.prune_blocks(model, bl.Budget(sparsity=0.5), [batch], progress=False)
    pruned = bl.prune_blocks(model.merge_and_unload(), bl.Budget(sparsity=0.5), [batch], progress=False)
    assert pruned.plan.sparsity == 0.5


class Words(nn.Module):
    """A small transformer of one block over words."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(0.1 * torch.randn(12, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places[: words.shape[1]]
        q, k, v = (layer(self.norm1(x)).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(self.norm3(x + self.down(F.gelu(self.up(self.norm2(x))))))


def trained(network: nn.Module, batches: list[tuple[Tensor, Tensor]], epochs: int, lr: float) -> nn.Module:
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr)
    for x, y in batches * epochs:
        loss = F.cross_entropy(network(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


def test_ranks_that_a_second_task_does_not_need_are_cut():
    """A network learns one task; the second one differs by a matrix of rank 2 in one of its layers."""
    torch.manual_seed(0)
    words = torch.randint(WORDS, (800, 13))
    for place in range(2, 13):  # a word follows from the two before it, but for noise
        known = torch.rand(len(words)) < 0.8
        words[known, place] = (words[known, place - 1] + 2 * words[known, place - 2]) % WORDS
    first = [(part[:, :-1], part[:, 1:]) for part in words.split(50)]
    base = trained(Words(), first, 6, 5e-3)
    second = copy.deepcopy(base)
    with torch.no_grad():
        second.v.weight += torch.randn(24, 2) @ torch.randn(2, 24)
        x, y = (torch.cat([pair[part] for pair in first]) for part in (0, 1))
        y = torch.distributions.Categorical(logits=second(x)).sample()
        unseen = torch.randint(WORDS, (400, 12))
    batches = list(zip(x.split(100), y.split(100), strict=True))

    @torch.no_grad()
    def distance(network: nn.Module) -> float:
        found, wanted = (model(unseen).log_softmax(-1) for model in (network, second))
        return float(F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1).mean())

    def with_adapter() -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=8, lora_alpha=8, target_modules=["q", "v", "up"])
        return peft.get_peft_model(copy.deepcopy(base), config)

    plain = trained(with_adapter(), batches, 30, 1e-2)
    recipe = bl.recipes.lora_ranks(epochs=30)
    bnn = bl.bayesianize(with_adapter(), likelihood=likelihoods.Categorical(class_dim=-1), **recipe)
    bnn.fit(batches, progress=False, **{**recipe.fit, "lr": 1e-2})
    pruned = bl.prune(bnn, recipe.budget, progress=False, **recipe.cut)
    slim = bl.compact(pruned, x[:2])
    ranks = {name.rpartition(".")[2]: rank for name, rank in slim.peft_config["default"].rank_pattern.items()}
    assert ranks["q"] == ranks["up"] == 1  # every layer keeps its best one
    assert 2 <= ranks["v"] <= 6
    assert distance(slim) < 0.2 * distance(base)
    assert distance(slim) < distance(plain)
    sizes = [sum(p.numel() for n, p in model.named_parameters() if "lora_" in n) for model in (slim, plain)]
    assert sizes[0] < 0.5 * sizes[1]
    merged = slim.merge_and_unload()
    assert type(merged) is Words
    torch.testing.assert_close(merged(x[:9]), pruned.mean_network()(x[:9]), rtol=1e-4, atol=1e-4)
