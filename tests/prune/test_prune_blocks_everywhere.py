"""Cuts block by block in two processes, and of a Hugging Face decoder."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from block_networks import Decoder, decoder, tokens
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import bayeslim as bl
from processes import in_processes

WAYS = {
    "restored": {"likelihood": bl.likelihoods.Categorical(), "tolerance": 1e-9, "progress": False},
    "local": {"curvature": "local", "tolerance": 1e-9, "progress": False},
    "kronecker": {
        "curvature": "kronecker",
        "likelihood": bl.likelihoods.Categorical(),
        "tolerance": 1e-9,
        "progress": False,
    },
}


def cut(**options):
    model = decoder().double()
    model.requires_grad_(False)
    pruned = bl.prune_blocks(model, bl.Budget(sparsity=0.5), tokens(batches=3), **options)
    assert all(solve.iterations for solve in pruned.plan.solves.values())
    return dict(pruned.model.state_dict())


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for way, options in WAYS.items():
        save_file(cut(checkpoint=f"{folder}/{way}", **options), f"{folder}/{way}-{rank}.safetensors")
    with pytest.raises(ValueError, match="for each of 2 process"):
        bl.prune_blocks(decoder(), bl.Budget(sparsity=0.5), tokens(batches=1))
    dist.destroy_process_group()


def test_two_processes_share_batches_and_solves_and_agree_with_one(tmp_path):
    in_processes(worker, 2, str(tmp_path))
    for way, options in WAYS.items():
        first, second = (load_file(tmp_path / f"{way}-{rank}.safetensors") for rank in range(2))
        resumed = cut(checkpoint=tmp_path / way, **options)  # one process reads the blocks that two have written
        for name, value in cut(**options).items():
            assert torch.equal(first[name], second[name])
            assert torch.equal(first[name], resumed[name])
            torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-8)


class Saving(Decoder):
    """A decoder whose forward may checkpoint its blocks."""

    def __init__(self, is_saving):
        super().__init__()
        self.is_saving = is_saving

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_saving else layer(x)
        return self.head(x)


@pytest.mark.parametrize("way", ["restored", "kronecker"])
def test_blocks_that_the_network_checkpoints_itself(way):
    cuts = []
    for is_saving in (False, True):
        torch.manual_seed(0)
        model, options = Saving(is_saving), WAYS[way] | {"steps": 1}
        cuts.append(bl.prune_blocks(model, bl.Budget(sparsity=0.5), tokens(), **options))
    for name, weight in cuts[0].model.state_dict().items():
        assert torch.equal(cuts[1].model.state_dict()[name], weight)


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 falls back to another product
@pytest.mark.parametrize("way", WAYS)
def test_a_hugging_face_decoder_in_bfloat16(way):
    model = llama().bfloat16()
    ids = torch.randint(0, 17, (4, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    batches = [{"input_ids": ids, "attention_mask": mask, "labels": ids}] * 2
    pruned = bl.prune_blocks(
        model, bl.Budget(sparsity=0.5), batches, **WAYS[way] | {"tolerance": 1e-3, "prior_std": 1e3}
    )
    assert len(pruned.plan.masks) == 14
    assert pruned.plan.sparsity == pytest.approx(0.5, abs=0.01)
    for name, kept in pruned.plan.masks.items():
        weight = pruned.model.get_parameter(name)
        assert weight.dtype == torch.bfloat16
        assert bool((weight[~kept] == 0).all())
        assert not torch.equal(weight, model.get_parameter(name) * kept)
    assert torch.isfinite(pruned.model(input_ids=ids).logits).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("way", ["restored", "local"])
def test_padding_does_not_count(way, side):
    """Without a likelihood: the random signs of one differ with the length."""
    model, ids = llama().double(), torch.randint(0, 17, (4, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    padded = {
        key: F.pad(value, (3, 0) if side == "left" else (0, 3), value=pad)
        for (key, value), pad in zip(batch.items(), (5, 0, -100), strict=True)
    }
    options = {"curvature": way, "steps": 2, "tolerance": 1e-9, "progress": False}
    alone, longer = (bl.prune_blocks(model, bl.Budget(sparsity=0.5), [given], **options) for given in (batch, padded))
    for name, weight in alone.model.state_dict().items():
        torch.testing.assert_close(longer.model.state_dict()[name], weight, rtol=1e-3, atol=1e-5)


def test_the_linear_layers_of_a_falcon_are_linear():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.FalconConfig(
        vocab_size=17, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, ffn_hidden_size=24
    )
    model = transformers.FalconForCausalLM(config)
    ids = torch.randint(0, 17, (4, 9))
    batches = [{"input_ids": ids, "labels": ids}]
    for way in WAYS.values():
        pruned = bl.prune_blocks(model, bl.Budget(sparsity=0.5), batches, **way)
        assert len(pruned.plan.masks) == 8
        assert pruned.plan.sparsity == pytest.approx(0.5, abs=0.01)


def test_blocks_have_the_same_widths_whatever_their_scores():
    """After a quarter of one layer, half of either layer is next."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)
    ]
    with torch.no_grad():
        blocks[1][2].weight.mul_(0.01)
    budget = bl.Budget(sparsity=0.3, scope="layer", uniform=True, round_to=4)
    pruned = bl.prune_blocks(
        nn.Sequential(*blocks), budget, [torch.randn(9, 4)], granularity="unit", blocks=["0", "1"], **WAYS["local"]
    )
    widths = [[int(pruned.plan.masks[f"{i}.{n}.weight"].any(1).sum()) for n in (0, 2)] for i in range(2)]
    assert widths[0] == widths[1]


def test_blocks_of_the_same_width_are_a_llama_with_a_smaller_config():
    model, ids = llama().eval(), torch.randint(0, 17, (4, 9))
    budget = bl.Budget(sparsity=0.3, scope="layer", uniform=True, round_to=4)
    batches = [{"input_ids": ids, "labels": ids}]
    pruned = bl.prune_blocks(model, budget, batches, granularity="unit", **WAYS["restored"])
    slim = bl.compact(pruned.model, {"input_ids": ids[:2]})
    assert type(slim) is type(model)
    assert slim.config.intermediate_size < 24
    assert slim.config.intermediate_size % 4 == 0
    torch.testing.assert_close(slim(input_ids=ids).logits, pruned.model(input_ids=ids).logits)
