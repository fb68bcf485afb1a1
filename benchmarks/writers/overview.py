"""The tables that gather one line from each of many results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from writers.markdown import listed, mean_and_std, table
from writers.pruning import NETWORKS
from writers.sparse import files, trained

Results = Mapping[str, Mapping[str, Any]]


def strongest(found: Results) -> str:
    """Write the table of the README."""
    rows: list[list[str]] = []
    one_shot, sparse, coded = found["one_shot_pruning"], found["sparse_posteriors"], found["entropy_coded"]
    for (name, title), sparsity in zip(NETWORKS.items(), ("0.95", "0.98"), strict=True):
        rules = one_shot["summary"][name]
        errors = [rules["dense"]["0"]["mean"], *(rules[rule][sparsity]["mean"] for rule in ("magnitude", "joint x10"))]
        mark = " †" if "provenance" in one_shot else ""
        what = f"{title} on MNIST, {100 * float(sparsity):g} % of the weights cut, no retraining{mark}"
        rows.append([what, *_bold(errors), "`benchmarks/one_shot_pruning.py`"])
    cases = {"lenet_300_100": "LeNet-300-100 on MNIST", "lenet5": "LeNet-5 on MNIST", "vgg": "VGG-like on CIFAR-10"}
    for name, title in cases.items():
        group = trained(sparse, name, "weights")
        errors = [statistics.mean(group.errors(key)) for key in ("dense", "magnitude", "sparse")]
        what = f"{title} trained to be sparse, 1 of {group.compression:.0f} weights left"
        rows.append([what, *_bold(errors), "`benchmarks/sparse_posteriors.py`"])
    for network, title in (("lenet5", "LeNet-5"), ("vgg", "VGG-like networks")):
        ensembles = found[f"five_for_one_{network}"]["rows"]
        mean = {way: _mean(ensembles, way, "error") for way in ("one dense", "five sparse")}
        times = _mean(ensembles, "one dense", "nonzeros") / _mean(ensembles, "five sparse", "nonzeros")
        what = f"Five sparse {title} as one ensemble, together 1 of {times:.0f} weights of one dense network"
        ours = f"**{mean['five sparse']:.2f}**"
        rows.append([what, f"{mean['one dense']:.2f}", "", ours, "`benchmarks/five_for_one.py`"])
    own = files(coded, "lenet5")
    dense = statistics.mean(trained(sparse, "lenet5", "weights").errors("dense"))
    errors = [dense, *(statistics.mean(own.decoded(of_magnitude=of)) for of in (True, False))]
    what = f"LeNet-5 in a file of {own.kilobytes():.1f} kB that decodes to the bit"
    rows.append([what, *_bold(errors), "`benchmarks/entropy_coded.py`"])
    cut = found["residual_pruning"]
    errors = [cut["settings"]["dense"], *(cut["error"][f"90%, {way}"] for way in ("magnitude", "measured"))]
    what = "A residual network on Fashion-MNIST, 90 % of the weights cut, no retraining"
    rows.append([what, *_bold(errors), "`benchmarks/residual_pruning.py`"])
    scores = found["out_of_distribution"]["table"]
    sets = ("kmnist", "notmnist", "fashion-mnist")
    plain, ours = ([scores[kind][name]["mean"] for name in sets] for kind in ("map", "subnetwork"))
    what = "Telling other images from MNIST digits: AUROC in %, plain network and subnetwork Laplace"
    ranges = [f"{min(plain):.0f} to {max(plain):.0f}", "", f"**{min(ours):.0f} to {max(ours):.1f}**"]
    rows.append([what, *ranges, "`benchmarks/out_of_distribution.py`"])
    return table(["", "dense", "magnitude", "bayeslim", "script"], rows)


def _mean(rows: list[Any], way: str, key: str) -> float:
    return statistics.fmean(row[key] for row in rows if row["row"] == way)


def _bold(errors: list[float]) -> list[str]:
    dense, magnitude, ours = (f"{error:.2f}" if error < 10 else f"{error:.1f}" for error in errors)
    return [dense, magnitude, f"**{ours}**"]


def others(found: Results) -> str:
    """Write the measurements that have no table of their own in `docs/results.md`."""
    rows = [line(found) for line in (
        _bayes_by_backprop, _variational_pruning, _compress, _exported_units, _continual, _out_of_distribution,
        _laplace_device, _encoder, _decoder, _laplace, _moments, _many_models, _samplers, _steps, _predictions,
        _c_export, _import_time,
    )]  # fmt: skip
    return table(["", "result", "how to repeat it"], rows)


def _repeat(found: Mapping[str, Any], *commands: str) -> str:
    doubtful = "provenance" in found or "outdated" in found
    return ", ".join(f"`{command}`" for command in commands) + (" †" if doubtful else "")


def _bayes_by_backprop(found: Results) -> list[str]:
    result = found["bayes_by_backprop"]
    errors = {name: mean_and_std(part["test_error_percent"]) for name, part in result["summary"].items()}
    settings = result["settings"]
    return [
        f"MNIST, Bayes by Backprop, two layers of {settings['units']} units, Gaussian prior, {settings['seeds']} "
        "seeds, "
        f"{settings['epochs']} epochs: test error",
        f"**{errors['blundell']} %** with Blundell's KL weights, {errors['cold']} % with a cold posterior, "
        f"{errors['exact']} % with a uniform KL weight (the paper: 1.82 % after 600 epochs)",
        _repeat(result, "python benchmarks/bayes_by_backprop.py --device cuda"),
    ]


def _variational_pruning(found: Results) -> list[str]:
    result = found["variational_pruning"]
    cuts = ("0", "0.75", "0.9", "0.95", "0.98")
    own = {
        (prior, rule): listed((points[cut] for cut in cuts), 2)
        for prior, rules in result["test_error"].items()
        for rule, points in rules.items()
    }
    return [
        f"The same network, log-uniform prior, {result['settings']['epochs']} epochs, {result['settings']['seeds']} "
        "seeds, "
        "cut by signal to noise without retraining: test error at 0 / 75 / 90 / 95 / 98 %",
        f"**{own['log-uniform', 'snr']} %**; by magnitude {own['log-uniform', 'magnitude']} %; Gaussian prior by "
        "signal "
        f"to noise {own['gaussian', 'snr']} %",
        _repeat(result, "python benchmarks/variational_pruning.py --device cuda --epochs 50 --seeds 3"),
    ]


def _compress(found: Results) -> list[str]:
    result = found["compress_lenet5"]
    sizes, settings = result["times"]["sizes"], result["settings"]
    faster = next(
        row["same_runtime"]["median"]
        for row in result["times"]["speedups"]
        if (row["runtime"], row["batch_size"]) == ("onnxruntime", 1)
    )
    dense, slim = (sizes[name]["file_bytes"]["onnxruntime"] / 1024 for name in ("dense", "slim"))
    return [
        f"LeNet-5 cut by units to {100 * (1 - settings['sparsity']):.2f} % of its weights in 5 steps, fine-tuned "
        f"{settings['fine_tune']} epochs, compacted; test error {result['test_error']['dense']:.2f} to "
        f"{result['test_error']['slim']:.2f} %; batch 1, one thread",
        f"both in onnxruntime: **{faster:.1f}x** faster; the ONNX file shrinks from {dense:,.0f} to {slim:.0f} KiB",
        _repeat(result, "python benchmarks/compress_lenet5.py"),
    ]


def _exported_units(found: Results) -> list[str]:
    result = found["exported_units"]
    files_of = [
        run["sizes"]["dense"]["file_bytes"]["onnxruntime"] / run["sizes"]["slim"]["file_bytes"]["onnxruntime"]
        for run in result["runs"]
    ]
    faster = [
        row["same_runtime"]["median"]
        for run in result["runs"]
        for row in run["speedups"]
        if (row["runtime"], row["batch_size"]) == ("onnxruntime", 1)
    ]
    return [
        f"LeNet-5 without the units that its gates closed, {len(result['runs'])} seeds, as ONNX: size, and time of one "
        "input on one thread",
        f"the file is **{min(files_of):.0f} to {max(files_of):.0f}** times smaller, and {min(faster):.1f} to "
        f"{max(faster):.1f} times faster in onnxruntime",
        _repeat(result, "python benchmarks/exported_units.py"),
    ]


def _continual(found: Results) -> list[str]:
    result = found["continual"]
    tasks = result["summary"]["permuted"]
    means = {rule: statistics.mean(row["accuracies_percent"]) for rule, row in tasks.items()}
    return [
        f"{tasks['kron']['tasks']} permuted MNIST tasks in turn, one seed: mean accuracy",
        f"**{means['kron']:.1f} %** online Kronecker Laplace, {means['online ewc']:.1f} % online EWC, "
        f"{means['ewc']:.1f} % "
        f"EWC, {means['nothing']:.1f} % nothing",
        _repeat(result, "python benchmarks/continual.py --device cuda --tasks 50"),
    ]


def _out_of_distribution(found: Results) -> list[str]:
    result = found["out_of_distribution"]
    own = result["table"]

    def aurocs(kind: str) -> str:
        values = [own[kind][name]["mean"] for name in ("fashion-mnist", "kmnist", "notmnist")]
        return " / ".join(f"{value:.0f}" if value < 99 else f"{value:.1f}" for value in values)

    kinds = ("map", "last layer", "diagonal", "kronecker", "subnetwork")
    errors = [own[kind]["error"]["mean"] for kind in kinds]
    return [
        f"MNIST against Fashion-MNIST / KMNIST / notMNIST, LeNet-300-100, {result['seeds']} seeds: AUROC of the "
        "predictive "
        "entropy",
        f"plain network {aurocs('map')}, last layer {aurocs('last layer')}, diagonal {aurocs('diagonal')}, Kronecker "
        f"{aurocs('kronecker')}, **subnetwork of 1,000 weights {aurocs('subnetwork')}**; test error {min(errors):.2f} "
        "to "
        f"{max(errors):.2f} % for all",
        _repeat(result, "python benchmarks/out_of_distribution.py --seeds 3"),
    ]


def _laplace_device(found: Results) -> list[str]:
    result = found["laplace_device"]
    own = result["results"]
    fits = {name: f"{own[f'{name} fit, exact']['seconds']:.2f} s" for name in NETWORKS}
    predictions = {name: f"{own[f'{name} predict']['seconds']:.2f} s" for name in NETWORKS}
    most = max(own[f"{name} predict"]["peak_gigabytes"] for name in NETWORKS)
    return [
        "Kronecker Laplace on a GPU: exact fit of 60,000 images, closed-form prediction of 10,000",
        f"LeNet-300-100 {fits['lenet_300_100']} and {predictions['lenet_300_100']}, LeNet-5 {fits['lenet5']} and "
        f"{predictions['lenet5']}, the prediction in at most {most:.1f} GB; ResNet-18 (50,000 CIFAR-sized images, one "
        f"backward) fitted in {own['resnet18 fit, signs, 50,000 inputs']['seconds']:.0f} s",
        _repeat(result, "python benchmarks/laplace_device.py --device cuda"),
    ]


def _encoder(found: Results) -> list[str]:
    own = found["streaming"]["results"]

    def shown(row: Mapping[str, Any]) -> str:
        return f"{row['cosine']:.3f} (zeros alone {row['cosine_of_zeros_alone']:.3f})"

    blocks, whole = own["encoder, local"], own["encoder, whole network"]
    return [
        "A sentence encoder of 22 M parameters with random weights, half of the weights of its layers cut, 256 "
        "sequences of "
        "32 to 128 words, one CPU thread (ARM, busy machine): CPU seconds, and cosine to the dense embedding",
        f"block by block, local curvature **{blocks['cpu_seconds']:.0f} s**, {shown(blocks)}; whole network, Kronecker "
        f"{whole['cpu_seconds']:.0f} s, {shown(whole)}",
        _repeat(found["streaming"], "python benchmarks/streaming.py --encoder"),
    ]


def _decoder(found: Results) -> list[str]:
    result = found["streaming"]
    own, block = result["results"]["1B, restored"], result["results"]["one block of 8B, restored"]
    return [
        f"A decoder of {own['parameters'] / 1e9:.1f} billion parameters in bfloat16 with random weights, half of the "
        "weights "
        f"of its blocks cut block by block, restored curvature, {own['tokens']:,} calibration tokens, "
        f"{own['machine']['gpu']}: seconds and peak memory, the network included",
        f"**{own['seconds']:.0f} s, {own['peak_memory_gb']:.1f} GB**; one block of 8B shape {block['seconds']:.0f} s, "
        f"{block['peak_memory_gb']:.1f} GB, so that 32 blocks take about {block['seconds_for_all_blocks'] / 60:.1f} "
        "minutes; "
        f"seconds grow with the depth to the power of {result['growth']['seconds over depth, restored']:.2f}",
        _repeat(result, "python benchmarks/streaming.py --device cuda"),
    ]


def _laplace(found: Results) -> list[str]:
    parts = []
    for name, machine in (("laplace", "ARM (Neoverse-N1)"), ("laplace_x86", "Intel Xeon")):
        times = found[name]["times"]

        def faster(kind: str, times: Mapping[str, Any] = times) -> str:
            values = [times[network][kind]["times_faster"] for network in NETWORKS]
            return " / ".join(f"{value:.1f}x" if value < 10 else f"{float(f'{value:.2g}'):,.0f}x" for value in values)

        parts.append(
            f"{machine}: Kronecker fit, exact {faster('kron exact')}, one backward {faster('kron one backward')}; "
            f"closed-form prediction (probit link) **{faster('predict')}**; subnetwork of 1,000 weights "
            f"{faster('subnetwork one backward')} (one backward), {faster('subnetwork')} (exact)"
        )
    return [
        "Laplace against laplace-torch's fastest backend, CPU, one thread, LeNet-300-100 / LeNet-5: times faster",
        f"{'. '.join(parts)}. The same evidence and predictive to 1e-8",
        _repeat(found["laplace"], "python benchmarks/laplace.py"),
    ]


def _moments(found: Results) -> list[str]:
    own = [found["moments"]["results"][name] for name in ("mlp", "lenet5")]
    costs = listed((row["cost"]["moments"]["ratio"] for row in own), 1)
    distances = {kind: listed((row["total_variation"][kind] for row in own), 3) for kind in ("moments", "32 samples")}
    return [
        "Prediction by moments, 10,000 inputs, 2 CPU cores: 784-400-400-10 MLP / LeNet-5",
        f"the cost of **{costs}** plain passes; total variation to 4,096 samples {distances['moments']}, where 32 "
        "samples "
        f"have {distances['32 samples']}",
        _repeat(found["moments"], "python benchmarks/moments.py --images 100"),
    ]


def _many_models(found: Results) -> list[str]:
    own = found["many_models"]["summary"]["mnist"]

    def both(name: str) -> str:
        return f"{own[name]['error']['mean']:.2f} / {own[name]['student error']['mean']:.2f}"

    return [
        "MNIST, 784-200-200-10, 5 seeds: test error, and of one plain network distilled from it",
        f"plain {own['map']['error']['mean']:.2f} %; deep ensemble {both('deep ensemble')}, snapshots "
        f"{both('snapshot')}, MC "
        f"dropout {both('mc dropout')}, SWAG {both('swag')}, variational {both('variational')}, Laplace "
        f"{both('laplace')}, cyclical SGHMC {both('cyclical sghmc')} %, the only one whose settings were tuned (on "
        "validation "
        "images)",
        _repeat(found["many_models"], "python benchmarks/many_models.py --workers 10"),
    ]


def _samplers(found: Results) -> list[str]:
    ratios = {
        name: [found[name]["results"]["mlp"][kind]["ratio"] for kind in ("sgld", "sghmc", "sghmc, prior in the loss")]
        for name in ("samplers", "samplers_cuda")
    }
    cpu, gpu = ratios["samplers"], ratios["samplers_cuda"]
    return [
        "A step of SGLD / SGHMC, prior N(0, 1), against SGD with momentum and no prior, 784-400-400-10 MLP",
        f"2 CPU cores **{cpu[0]:.2f}x / {cpu[1]:.2f}x**, H200 **{gpu[0]:.2f}x / {gpu[1]:.2f}x**; with a prior that is "
        "not one "
        f"Gaussian for all weights {cpu[2]:.1f}x, and {gpu[2]:.1f}x on the H200, where kernel launches dominate a step",
        _repeat(found["samplers"], "python benchmarks/samplers.py", "--device cuda"),
    ]


def _fastest_peer(rows: Mapping[str, Any]) -> tuple[str, float]:
    peers = {name: row["ratio"] for name, row in rows.items() if not name.startswith(("bayeslim", "plain"))}
    best = min(peers, key=peers.__getitem__)
    return best, peers[best]


def _steps(found: Results) -> list[str]:
    own = [found["steps"]["results"][name]["step"] for name in ("mlp", "lenet5")]
    shared, local = (listed((row[f"bayeslim {kind}"]["ratio"] for row in own), 1) for kind in ("shared", "local"))
    peers = [_fastest_peer(row) for row in own]
    return [
        "A training step on 2 CPU cores (ARM), against the plain network's: 784-400-400-10 MLP / LeNet-5",
        f"shared noise **{shared}**, local {local}; the fastest peers {listed((value for _, value in peers), 1)} "
        f"({' and '.join(dict.fromkeys(name for name, _ in peers))})",
        _repeat(found["steps"], "make benchmark-peers"),
    ]


def _predictions(found: Results) -> list[str]:
    own = [found["steps"]["results"][name]["predict 1000"] for name in ("mlp", "lenet5")]
    ours = [row["bayeslim shared"]["ratio"] for row in own]
    return [
        "A prediction by 32 networks on the same, 1,000 inputs, against one pass of the plain one: 784-400-400-10 MLP "
        "/ "
        "LeNet-5",
        f"{listed(ours, 0)}; the fastest peers {listed((_fastest_peer(row)[1] for row in own), 0)}",
        _repeat(found["steps"], "make benchmark-peers"),
    ]


def _c_export(found: Results) -> list[str]:
    rows = {(r["network"], r["cut"]): r for r in found["c_export"]["rows"] if r["batch"] == 1}

    def faster(network: str, cut: str, call: str) -> str:
        row = rows[network, cut]
        return " / ".join(f"{row[f'speed-up over {base} dense'][call]:.0f}x" for base in ("torch", "onnxruntime"))

    cells = [
        f"{words}: **{faster(network, cut, 'C')}**, a prepared call {faster(network, cut, 'C bound')}"
        for network, cut, words in (
            ("lenet5", "random", "LeNet-5 with 1 % of its weights, cut at random"),
            ("lenet5", "trained", "cut in a short training, which keeps two thirds of the first layer"),
            ("lenet_300_100", "random", "LeNet-300-100 with 5 %, cut at random"),
        )
    ]
    return [
        "Sparse LeNets as C, one input, one thread (ARM), called from Python: times faster than dense PyTorch / dense "
        "onnxruntime",
        "; ".join(cells),
        _repeat(found["c_export"], "python benchmarks/c_export.py"),
    ]


def _import_time(found: Results) -> list[str]:
    result = found["import_time"]
    more = result["more_than_torch"]
    return [
        "CPU seconds of importing, beside `import torch`: the package, the names that a Laplace approximation needs, "
        "all public names",
        f"{more['bayeslim']:+.2f} / {more['first use']:+.2f} / {more['all names']:+.2f} s (torch alone: "
        f"{result['seconds']['torch']:.1f} s; the aim for the package: at most +0.3 s)",
        _repeat(result, "python benchmarks/import_time.py"),
    ]
