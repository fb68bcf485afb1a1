"""The baselines of the language-model benchmark do what their papers say, on small cases, and the benchmark runs."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def baselines(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("one_shot_baselines")


def problem(inputs=24, outputs=10, rows=200):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    mixing = torch.logspace(0, -2, inputs, dtype=torch.float64)[:, None] * mixing  # correlated, as activations are
    x = torch.randn(rows, inputs, generator=generator, dtype=torch.float64) @ mixing
    return torch.randn(outputs, inputs, generator=generator, dtype=torch.float64), x, x.T @ x


def error(x, weight, cut):
    return float((x @ (weight - cut).T).square().sum())


def test_each_rule_leaves_less_error_than_the_one_before(baselines):
    weight, x, hessian = problem()
    for target in (baselines.Target(0.5), baselines.Target(0.5, 2, 4)):
        found = {name: cut(weight, hessian, target) for name, cut in baselines.BASELINES.items()}
        errors = {name: error(x, weight, cut) for name, cut in found.items()}
        assert errors["sparsegpt"] < 0.7 * min(errors["magnitude"], errors["wanda"])
        assert errors["row"] < errors["sparsegpt"]
        for name, cut in found.items():
            assert float((cut == 0).double().mean()) == pytest.approx(0.5), name
            if target.m:
                assert bool(((cut != 0).unflatten(1, (-1, 4)).sum(-1) == 2).all()), name
        assert bool(((found["wanda"] == 0).sum(1) == 12).all())


def test_wanda_is_magnitude_by_rows_for_inputs_of_equal_norms(baselines):
    weight, *_ = problem()
    found = baselines.wanda(weight, torch.eye(24, dtype=torch.float64), baselines.Target(0.5))
    smallest = weight.abs().argsort(1)[:, :12]
    assert torch.equal(found, weight.scatter(1, smallest, 0.0))


def test_rows_are_solved_exactly(baselines):
    weight, x, hessian = problem()
    gone = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    found = baselines.solved_rows(weight, hessian, gone)
    for w, row, cut in zip(weight, found, gone, strict=True):
        wanted = torch.linalg.lstsq(x[:, ~cut], (x @ w)[:, None], driver="gelsd").solution[:, 0]
        torch.testing.assert_close(row[~cut], wanted, rtol=1e-6, atol=1e-8)
        assert not bool(row[cut].any())


def test_sparsegpt_of_one_column_at_the_end_is_optimal(baselines):
    """With only the first column cut, the others go to their least-squares place (up to the damping)."""
    weight, _, hessian = problem(inputs=8)
    weight[:, 0] *= 1e-9
    weight[:, 0] += 1e-3  # by far the cheapest
    found = baselines.sparsegpt(weight, hessian, baselines.Target(1 / 8))
    gone = torch.zeros_like(weight, dtype=torch.bool)
    gone[:, 0] = True
    assert torch.equal(found == 0, gone)
    damped = baselines.damped(hessian)
    torch.testing.assert_close(found, baselines.solved_rows(weight, damped, gone), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("target", [(0.5, 0, 0), (0.5, 2, 4)])
def test_sparsegpt_is_the_surgeon_that_moves_later_columns_only(baselines, target, monkeypatch):
    """Frantar & Alistarh 2023, section 3: cut w_j, and add -w_j / [H_F⁻¹]_jj · [H_F⁻¹]_j to the columns F from j on."""
    monkeypatch.setattr(baselines, "COLUMNS_PER_BLOCK", 8)
    weight, _, hessian = problem()
    found = baselines.sparsegpt(weight, hessian, baselines.Target(*target))
    full, wanted = baselines.damped(hessian), weight.clone()
    for column in range(weight.shape[1]):
        inverse = torch.linalg.inv(full[column:, column:])
        moved = wanted[:, column, None] / inverse[0, 0] * inverse[0]
        wanted[:, column:] -= torch.where(found[:, column, None] == 0, moved, 0.0)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def tiny_byte_gpt(monkeypatch):
    benchmark = importlib.import_module("language_models")
    tiny = importlib.import_module("byte_gpt").Shape(blocks=1, width=16, heads=2, context=16)
    monkeypatch.setattr(benchmark, "Shape", lambda **_: tiny)
    monkeypatch.setattr(benchmark, "python_source", lambda _: (torch.arange(4000).to(torch.uint8),) * 2)
    return benchmark


def test_the_benchmark_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    benchmark = tiny_byte_gpt(monkeypatch)
    options = (
        f"--small --train-steps 3 --checkpoint {tmp_path}/net.pt --results {tmp_path}/out.json "
        "--models byte-gpt --seeds 0 --targets 2:4 --rules"
    )
    for rules in (["sparsegpt"], ["sparsegpt", "blocks x1", "bayeslim x1"]):
        monkeypatch.setattr(sys, "argv", ["language_models.py", *options.split(), *rules])
        benchmark.main()
        cells = json.loads((tmp_path / "out.json").read_text())["models"]["byte-gpt"]["cells"]
        assert set(cells) == {f"{rule} | 2:4 | seed 0" for rule in rules}
        assert all("log_perplexity" in cell for cell in cells.values()), cells
    assert capsys.readouterr().out.count("sparsegpt | 2:4") == 1
    (tmp_path / "net.pt").unlink()
    another = ["language_models.py", *options.split(), "magnitude"]
    another[another.index("--train-steps") + 1] = "5"
    monkeypatch.setattr(sys, "argv", another)
    benchmark.main()
    cells = json.loads((tmp_path / "out.json").read_text())["models"]["byte-gpt"]["cells"]
    assert set(cells) == {"magnitude | 2:4 | seed 0"}  # those of the other network are gone


def test_a_cell_that_would_take_too_long_does_not_begin(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    benchmark = tiny_byte_gpt(monkeypatch)
    options = f"--small --train-steps 3 --checkpoint {tmp_path}/net.pt --results {tmp_path}/out.json --minutes 0"
    monkeypatch.setattr(sys, "argv", ["language_models.py", *options.split(), "--models", "byte-gpt", "--seeds", "0"])
    benchmark.main()
    assert "no time for byte-gpt | sparsegpt | 70 % | seed 0" in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()


def test_the_table_shows_means_spreads_and_damage(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    table = importlib.import_module("writers.language_models")
    found = {"sparsegpt": (4.0, 5.0), "bayeslim x1": (3.0, 3.0), "magnitude": (1e7,)}
    cells = {
        f"{rule} | 70 % | seed {seed}": {"log_perplexity": math.log(value), "seconds": 2.0 + seed, "peak_gb": 1.5}
        for rule, values in found.items()
        for seed, value in enumerate(values)
    }
    cells["row | 70 % | seed 0"] = {"error": "out of memory"}
    model = {"dense_log_perplexity": math.log(2.0), "cells": cells}
    lines = table.markdown({"models": {"smollm2": model}}).splitlines()
    assert lines[0] == "SmolLM2-135M, dense perplexity 2.000, 2 calibration seeds:"
    ratio = (math.log(1.5) / math.log(2.0) + math.log(1.5) / math.log(2.5)) / 2
    assert f"| bayeslim, whole network, one step | 3.000 ({ratio:.2f}) | 2.5 | 1.5 |" in lines
    assert "| SparseGPT | 4.500 ± 0.707 | 2.5 | 1.5 |" in lines
    assert any(line.startswith("| magnitude | 1e7 (") for line in lines)
    assert not any("row-wise" in line for line in lines)


@pytest.fixture
def llama(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("llama")


def tiny_llama(llama, blocks=2):
    torch.manual_seed(0)
    return llama.Llama(llama.Shape(blocks=blocks, width=32, hidden=48, heads=4, kv_heads=2, vocabulary=50)).eval()


def test_the_plain_llama_equals_transformers(llama):
    transformers = pytest.importorskip("transformers")
    network = tiny_llama(llama)
    shape = network.shape
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=True,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    names |= {key: f"self_attn.{key}_proj" for key in "qkvo"}
    names |= {key: f"mlp.{key}_proj" for key in ("gate", "up", "down")}
    state = {"model.embed_tokens.weight": network.embedding.weight, "model.norm.weight": network.norm.weight}
    for name, p in network.blocks.named_parameters():
        number, *_, layer, leaf = name.split(".")
        state[f"model.layers.{number}.{names[layer]}.{leaf}"] = p
    assert not theirs.load_state_dict(state, strict=False).unexpected_keys
    tokens = torch.randint(50, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(network(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_gguf_tensors_equal_those_of_the_package(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(FOLDER)
    reader = importlib.import_module("gguf_file")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_array("names", ["one", "two"])
    kinds = gguf.GGMLQuantizationType
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).numpy()
    wanted = {}
    for kind in (kinds.F32, kinds.Q8_0, kinds.Q4_1):
        packed = gguf.quants.quantize(values, kind)
        wanted[kind.name] = gguf.quants.dequantize(packed, kind)
        writer.add_tensor(kind.name, packed, raw_dtype=None if kind is kinds.F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    (tmp_path / "parts").mkdir()
    for part, half in enumerate((content[:300], content[300:])):
        (tmp_path / "parts" / f"tiny.gguf.{part}").write_bytes(half)
    found = reader.read_gguf(reader.join_parts(tmp_path / "parts", "tiny.gguf"))
    assert found.metadata["llama.block_count"] == 3
    assert found.metadata["names"] == ["one", "two"]
    for name, tensor in wanted.items():
        assert found.tensors[name].tolist() == tensor.tolist(), name
    with pytest.raises(ValueError, match="join all its parts"):
        reader.read_gguf(content[300:])


def test_our_rules_and_the_baselines_cut_a_llama(llama):
    benchmark = importlib.import_module("language_models")
    network = tiny_llama(llama, blocks=1)
    x = torch.randint(50, (8, 12))
    subject = benchmark.Subject("smollm2", network, lambda _: (x, x.roll(-1, 1)), (x, x.roll(-1, 1)), 4, {})
    dense = benchmark.DensePosterior()
    units = [(rule, "units 30 %") for rule in ("magnitude", "blocks x1", "bayeslim x1")]
    for rule, target in (("row", "50 %"), ("bayeslim x4", "2:4"), *units):
        found = benchmark.measured(benchmark.Cell("smollm2", rule, target, 0), subject, dense, 1.0)
        assert math.isfinite(found["log_perplexity"])
        assert "sparsity" not in found or found["sparsity"] == pytest.approx(0.3 if "units" in target else 0.5, abs=0.1)


def test_prose_has_no_markup(llama):
    body = "'''Logic''' studies [[inference|inferences]]<ref name=a>{{cite}}</ref> {{nested {{twice}}}}" + " and" * 20
    page = f"{{{{Infobox|x}}}}\n== History ==\n* a list\n[[File:a.png|thumb|by [[him]]]]{body}\nshort"
    assert llama.plain_text(page) == "Logic studies inferences " + " and" * 20
