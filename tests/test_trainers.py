"""Training loops of other libraries: Lightning, the Trainer of Hugging Face, Accelerate and one's own."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim.trainers import Following
from bayeslim.trainers.following import evaluate

EPOCHS = 3


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 2, generator=generator)
    return x, (x[:, 0] > 0).long()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data()), batch_size=16)


def bayesian(method: bl.Method, *norms: nn.Module) -> bl.Bayesian:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), *norms, nn.Tanh(), nn.Linear(8, 2))
    own_optimizer = isinstance(method, bl.SGLD | bl.SGHMC | bl.IVON)  # which needs the size of the data
    num_data = 96 if own_optimizer else None
    return bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical(), num_data=num_data)


def train(bnn: bl.Bayesian, optimizer: torch.optim.Optimizer, epochs: int = EPOCHS) -> None:
    bnn.train()
    for _ in range(epochs):
        for batch in loader():
            loss = bnn.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


METHODS = [
    bl.Variational(), bl.IVON(), bl.Laplace(), bl.SWA(), bl.SWAG(start=0.0, every=1, samples=2),
    bl.Snapshot(cycles=3), bl.SGLD(samples=2), bl.SGHMC(samples=2), bl.MCDropout(),
    bl.MCBatchNorm(samples=3),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_loop_of_ones_own_ends_with_a_posterior(method: bl.Method) -> None:
    bnn = bayesian(method, nn.BatchNorm1d(8) if isinstance(method, bl.SWAG | bl.MCBatchNorm) else nn.Dropout(0.1))
    optimizer = bnn.optimizer(0.01 if not isinstance(method, bl.SGLD | bl.SGHMC) else None)
    with Following(bnn, loader(), optimizer, epochs=EPOCHS) as run:
        assert run.evaluate(loader())["error"] <= 1  # also before there is a posterior
        train(bnn, optimizer)
    assert bnn.step == EPOCHS * 6
    assert bnn.num_data == 96
    found = bl.predict(bnn, data()[0], 8)
    assert found.samples.shape[1:] == (96, 2)
    assert bool(found.epistemic.max() > 0) or isinstance(method, bl.SWA)
    assert set(run.evaluate(loader())) == {"nll", "error", "ece"}
    with Following(bnn, loader(), optimizer, epochs=EPOCHS) as again:
        train(bnn, optimizer, EPOCHS)
        again.evaluate(loader())  # the posterior of the last run does not describe these weights
    assert bnn.step == 2 * EPOCHS * 6
    assert bl.predict(bnn, data()[0], 8).samples.shape[1:] == (96, 2)


def test_moments_are_those_of_fit() -> None:
    """The same steps give the posterior that `fit` gives."""
    method = bl.SWAG(start=0.5, rate=1.0, every=2)
    ours, theirs = bayesian(method), bayesian(method)
    theirs.fit(loader(), epochs=EPOCHS, lr=0.01, progress=False)
    optimizer = ours.optimizer(0.01)
    with Following(ours, loader(), optimizer, epochs=EPOCHS):
        train(ours, optimizer)
    for name, value in theirs.posterior_.mean.items():
        torch.testing.assert_close(ours.posterior_.mean[name], value)
        torch.testing.assert_close(ours.posterior_.variance[name], theirs.posterior_.variance[name])


@pytest.mark.parametrize(
    "method", [bl.SWAG(start=0.5, every=1, rank=4), bl.Snapshot(cycles=3), bl.SGLD(samples=6)], ids=lambda m: m.name
)
def test_a_resumed_run_ends_with_the_networks_of_the_whole_run(method: bl.Method) -> None:
    whole, first, second = bayesian(method), bayesian(method), bayesian(method)
    optimizer = whole.optimizer(0.01)
    with Following(whole, loader(), optimizer, epochs=EPOCHS):
        train(whole, optimizer)
    optimizer = first.optimizer(0.01)
    run = Following(first, loader(), optimizer, epochs=EPOCHS)
    train(first, optimizer, 2)
    done, collected = run.done, run.collected()
    weights, moments = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    train(first, optimizer, 1)  # what follows the checkpoint does not change it
    second.load_state_dict(weights)
    optimizer = second.optimizer(0.01)
    optimizer.load_state_dict(moments)
    with Following(second, loader(), optimizer, epochs=EPOCHS, done=done, collected=collected) as run:
        train(second, optimizer, 1)
    assert done == 12
    assert run.done == 18
    for name, value in whole.posterior_.tensors().items():
        if isinstance(method, bl.SGLD):  # whose noise differs
            assert second.posterior_.tensors()[name].shape == value.shape
        else:
            torch.testing.assert_close(second.posterior_.tensors()[name], value)


def test_a_resumed_run_without_its_networks_is_refused_before_it_trains() -> None:
    bnn = bayesian(bl.SWAG(start=0.5, every=1))
    with pytest.raises(bl.errors.BayeslimError, match=r"3 steps from 10 to 12.*of 0 steps.*a larger start"):
        Following(bnn, loader(), bnn.optimizer(0.01), epochs=EPOCHS, done=12)
    run = Following(bnn, loader(), bnn.optimizer(0.01), epochs=EPOCHS, done=9)
    assert run.done == 9
    with pytest.raises(ValueError, match="done must be"):
        Following(bnn, loader(), bnn.optimizer(0.01), epochs=EPOCHS, done=-1)


def test_one_iteration_of_several_optimizers_is_one_step() -> None:
    bnn = bayesian(bl.SWAG(start=0.5, every=1))
    own = bnn.optimizer(0.01)  # it counts steps already
    others = [torch.optim.SGD([parameter], lr=0.01) for parameter in bnn.parameters()]
    with Following(bnn, loader(), [own, *others], epochs=EPOCHS) as run:
        for _ in range(EPOCHS):
            for batch in loader():
                bnn.loss(batch).backward()
                for optimizer in (own, *others):
                    optimizer.step()
                own.zero_grad()
    assert bnn.step == EPOCHS * 6
    assert run.collector.taken == list(range(10, 19))


def test_an_error_leaves_no_hook_and_no_posterior() -> None:
    bnn = bayesian(bl.Laplace())
    optimizer = bnn.optimizer(0.01)
    with pytest.raises(KeyError), Following(bnn, loader(), optimizer, epochs=1) as run:
        raise KeyError
    assert run._stepped not in optimizer._optimizer_step_post_hooks.values()
    with pytest.raises(bl.errors.NotFitted):
        _ = bnn.posterior_


def test_what_cannot_be_followed_is_refused() -> None:
    for method in (bl.DeepEnsemble(members=2), bl.SVGD(), bl.HMC(), bl.MultiSWAG(), bl.Subspace()):
        with pytest.raises(bl.errors.UnsupportedModel, match="in a loop of its own"):
            Following(bayesian(method), loader(), torch.optim.SGD([torch.zeros(1, requires_grad=True)]), epochs=1)
    bnn = bayesian(bl.SGLD())
    with pytest.raises(bl.errors.BayeslimError, match="its own optimizer"):
        Following(bnn, loader(), torch.optim.SGD(bnn.parameters(), lr=0.1), epochs=1)
    with pytest.raises(bl.errors.UnsupportedModel, match="one chain"):
        Following(bayesian(bl.SGLD(chains=2)), loader(), bnn.optimizer(), epochs=1)
    with pytest.raises(ValueError, match="either epochs, or total"):
        Following(bnn, loader(), bnn.optimizer())
    with pytest.raises(ValueError, match="Got an empty list"):
        Following(bnn, loader(), [], epochs=1)
    short = bayesian(bl.SWAG())
    run = Following(short, loader(), short.optimizer(), epochs=1)
    with pytest.raises(bl.errors.BayeslimError, match="took 0 networks"):
        run.finish()


def test_values_are_measured() -> None:
    x = torch.linspace(-1, 1, 32)[:, None]
    bnn = bl.bayesianize(nn.Linear(1, 1), bl.Variational(), likelihood=bl.likelihoods.Gaussian(0.5), num_data=32)
    assert set(evaluate(bnn, [(x, x)])) == {"nll", "rmse"}


def test_yes_no_targets_and_counts_are_measured() -> None:
    x, (first, second) = data()[0], (slice(0, 40), slice(40, 96))
    binary = bl.bayesianize(nn.Linear(2, 1), bl.Laplace(), likelihood=bl.likelihoods.Bernoulli())
    y = (x[:, :1] > 0).float()
    found = evaluate(binary, [(x[first], y[first]), (x[second], y[second])])
    logits = binary.model(x).detach()
    assert found["nll"] == pytest.approx(float(nn.functional.binary_cross_entropy_with_logits(logits, y)), rel=1e-5)
    assert found["error"] == pytest.approx(float(((logits > 0) != y.bool()).float().mean()))
    assert 0 <= found["ece"] <= 1
    counts = bl.bayesianize(nn.Linear(2, 1), bl.Laplace(), likelihood=bl.likelihoods.Poisson())
    y = x[:, :1].abs().round()
    found = evaluate(counts, [(x[first], y[first]), (x[second], y[second])])
    outputs = counts.model(x).detach()
    assert found["nll"] == pytest.approx(-float(counts.likelihood.log_prob(outputs, y).mean()), rel=1e-5)
    mean = counts.likelihood.predict(outputs[None]).mean
    assert found["rmse"] == pytest.approx(float((mean - y).square().mean().sqrt()), rel=1e-5)
    counts = bl.bayesianize(nn.Linear(2, 1), bl.Variational(), likelihood=bl.likelihoods.Poisson(), num_data=96)
    assert set(evaluate(counts, [(x, y)], samples=4)) == {"nll", "rmse"}


@pytest.mark.parametrize("method", [bl.Variational(), bl.Laplace()], ids=lambda method: method.name)
def test_accelerate(method: bl.Method) -> None:
    accelerate = pytest.importorskip("accelerate")
    bnn = bayesian(method)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    objective, optimizer, batches = accelerator.prepare(bnn.objective, bnn.optimizer(0.05), loader())
    with Following(bnn, batches, optimizer, epochs=EPOCHS, accumulate=2) as run:
        for _ in range(EPOCHS):
            for batch in batches:
                with accelerator.accumulate(objective):
                    accelerator.backward(objective(batch))
                    optimizer.step()
                    optimizer.zero_grad()
    assert bnn.step == EPOCHS * 3
    assert run.evaluate(loader())["error"] < 0.3
    bayesian(bl.Variational()).fit(batches, epochs=1, seed=0, progress=False)


@pytest.fixture(scope="module")
def lightning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("lightning.pytorch")


def lightning_trainer(lightning: Any, folder: Path, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(default_root_dir=folder, **quiet, **{"max_epochs": EPOCHS, **options})


@pytest.mark.filterwarnings("ignore")  # Lightning's own advice
def test_lightning_trains_and_finds_the_posterior(lightning: Any, tmp_path: Path) -> None:
    from bayeslim.trainers.lightning import BayesianCallback, BayesianModule

    bnn = bayesian(bl.Laplace())
    trainer = lightning_trainer(lightning, tmp_path, accumulate_grad_batches=2, enable_checkpointing=False)
    trainer.fit(BayesianModule(bnn, lr=0.1), loader(), loader())
    assert bnn.step == EPOCHS * 3
    assert bnn.num_data == 96
    assert {"train_nll", "train_kl", "val_nll", "val_error", "val_ece"} <= trainer.callback_metrics.keys()
    assert float(trainer.callback_metrics["val_error"]) < 0.2
    assert bl.predict(bnn, data()[0]).epistemic.max() > 0

    class Own(lightning.LightningModule):
        def __init__(self, network: nn.Module):
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.network.loss(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(bl.errors.BayeslimError, match="holds none"):
        lightning_trainer(lightning, tmp_path, callbacks=[BayesianCallback()]).fit(Own(nn.Linear(1, 1)), loader())
    warm = bayesian(bl.Variational(kl_schedule=bl.schedules.Warmup(end=4)))
    trainer = lightning_trainer(lightning, tmp_path, callbacks=[BayesianCallback()])
    trainer.fit(Own(warm), loader())
    assert warm.step == EPOCHS * 6
    file = tmp_path / "last.ckpt"
    trainer.save_checkpoint(file)
    again = bayesian(warm.method)
    longer = lightning_trainer(lightning, tmp_path, callbacks=[BayesianCallback()], max_epochs=EPOCHS + 1)
    longer.fit(Own(again), loader(), ckpt_path=file, weights_only=False)
    assert again.step == (EPOCHS + 1) * 6  # the KL goes on where it was


@pytest.mark.filterwarnings("ignore")  # Lightning's own advice
@pytest.mark.parametrize(("limit", "steps"), [(4, 2), (0.5, 2), (1.0, 3)])
def test_an_epoch_has_the_steps_of_lightning(lightning: Any, tmp_path: Path, limit: float, steps: int) -> None:
    from bayeslim.trainers.lightning import BayesianModule

    bnn, options = bayesian(bl.Variational()), {"limit_train_batches": limit, "accumulate_grad_batches": 2}
    trainer = lightning_trainer(lightning, tmp_path, max_epochs=1, enable_checkpointing=False, **options)
    trainer.fit(BayesianModule(bnn, lr=0.1), loader())
    assert bnn.steps_per_epoch == bnn.step == steps
    assert bnn.num_data == 96


@pytest.mark.filterwarnings("ignore")  # Lightning's own advice
def test_lightning_finds_the_posterior_in_its_own_precision(lightning: Any, tmp_path: Path) -> None:
    from bayeslim.trainers.lightning import BayesianModule

    bnn = bayesian(bl.Laplace())
    trainer = lightning_trainer(lightning, tmp_path, max_epochs=1, precision="64-true", enable_checkpointing=False)
    trainer.fit(BayesianModule(bnn, lr=0.1), loader())
    assert bl.predict(bnn, data()[0].double()).probs.dtype == torch.float64
    trainer.validate(BayesianModule(bnn), loader(), verbose=False)
    assert float(trainer.callback_metrics["val_nll"]) < 1


@pytest.mark.filterwarnings("ignore")  # Lightning's own advice
@pytest.mark.parametrize("method", [bl.SWAG(start=0.5, every=1), bl.Snapshot(cycles=3)], ids=lambda m: m.name)
def test_lightning_resumes_with_the_networks_it_took(lightning: Any, tmp_path: Path, method: bl.Method) -> None:
    from bayeslim.trainers.lightning import BayesianModule

    class Stop(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole, again = bayesian(method), bayesian(method)
    options = {"enable_checkpointing": False}
    lightning_trainer(lightning, tmp_path, callbacks=[Stop()], **options).fit(BayesianModule(whole, lr=0.01), loader())
    file = tmp_path / "1.ckpt"
    lightning_trainer(lightning, tmp_path, **options).fit(BayesianModule(again, lr=0.01), loader(), ckpt_path=file)
    assert again.step == EPOCHS * 6
    for name, value in whole.posterior_.tensors().items():
        torch.testing.assert_close(again.posterior_.tensors()[name], value)
    stored = torch.load(file, weights_only=True)
    stored["callbacks"]["BayesianCallback"].pop("collected")
    torch.save(stored, file)
    bare, trainer = bayesian(method), lightning_trainer(lightning, tmp_path, **options)
    with pytest.raises(bl.errors.BayeslimError, match="training goes on after step 12"):
        trainer.fit(BayesianModule(bare, lr=0.01), loader(), ckpt_path=file)
    assert bare.step == 12


class Classifier(nn.Module):
    """A model that takes its inputs by name, as the Trainer passes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


@pytest.mark.filterwarnings("ignore")  # of torch and transformers about this machine
def test_the_trainer_of_hugging_face_resumes_with_the_networks_it_took(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from bayeslim.trainers.transformers import BayesianCallback, TrainerModel

    def trained(checkpoint: Path | None) -> bl.Bayesian:
        torch.manual_seed(0)
        bnn = bl.bayesianize(Classifier(), bl.SWAG(start=0.5, every=1), likelihood=bl.likelihoods.Categorical())
        rows = [{"features": x, "labels": y} for x, y in zip(*data(), strict=True)]
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path, num_train_epochs=EPOCHS, per_device_train_batch_size=16, remove_unused_columns=False,
            report_to=[], save_strategy="epoch", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            TrainerModel(bnn), arguments, train_dataset=rows, optimizers=(bnn.optimizer(0.05), None),
            callbacks=[BayesianCallback()],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return bnn

    file = tmp_path / "checkpoint-12"
    whole, again = trained(None), trained(file)
    assert again.step == EPOCHS * 6
    for name, value in whole.posterior_.tensors().items():
        torch.testing.assert_close(again.posterior_.tensors()[name], value)
    shutil.rmtree(file / "collected")
    with pytest.raises(bl.errors.BayeslimError, match="training goes on after step 12"):
        trained(file)


@pytest.mark.filterwarnings("ignore")  # of torch and transformers about this machine
def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from bayeslim.trainers.transformers import BayesianCallback, TrainerModel, scores

    torch.manual_seed(0)
    bnn = bl.bayesianize(Classifier(), bl.SWAG(start=0.5, every=2), likelihood=bl.likelihoods.Categorical())
    rows = [{"features": x, "labels": y} for x, y in zip(*data(), strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, num_train_epochs=EPOCHS, per_device_train_batch_size=16, remove_unused_columns=False,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer = transformers.Trainer(
        TrainerModel(bnn, samples=16), arguments, train_dataset=rows, eval_dataset=rows,
        optimizers=(bnn.optimizer(0.05), None), callbacks=[BayesianCallback()], compute_metrics=scores,
    )  # fmt: skip
    trainer.train()
    assert bnn.step == EPOCHS * 3
    assert bnn.num_data == 96
    found = trainer.evaluate()
    assert found["eval_error"] < 0.3
    assert found["eval_loss"] == pytest.approx(found["eval_nll"], rel=1e-3)
    assert bl.predict(bnn, {"features": data()[0]}).epistemic.max() > 0
    arguments.remove_unused_columns = True
    with pytest.raises(bl.errors.BayeslimError, match="remove_unused_columns=False"):
        BayesianCallback().on_train_begin(arguments, None, None, TrainerModel(bnn))
