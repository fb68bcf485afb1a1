"""
Many processes
==============

Train one Bayesian network in several processes. ``bnn.objective`` is a module whose output is the loss: wrap it in
``DistributedDataParallel`` and call the wrapper, so that gradients are averaged.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import pyplot as plt

import bayeslim as bl

# %%
# The training script. Every process reads its own part of the data: ``rank`` and ``world_size`` split each epoch.

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import bayeslim as bl

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
digits = bl.data.load("digits")
loader = bl.data.Loader(digits.train_x, digits.train_y, batch_size=64 // world, rank=rank, world_size=world)

torch.manual_seed(0)
bnn = bl.bayesianize(
    bl.zoo.mlp(hidden=64, inputs=64),
    bl.Variational(),
    likelihood=bl.likelihoods.Categorical(),
    num_data=len(digits.train_x),
)
objective = DistributedDataParallel(bnn.objective)
optimizer = bnn.optimizer(lr=3e-3)
torch.manual_seed(rank)  # every process draws its own noise
for epoch in range(5):
    for batch in loader:
        optimizer.zero_grad()
        loss = objective(batch)
        loss.backward()
        optimizer.step()
if rank == 0:
    bl.save(bnn, sys.argv[1])
dist.destroy_process_group()
"""

# %%
# Start it with ``torchrun``, here with one and with two processes. A batch has 64 examples in both cases.

digits = bl.data.load("digits")
scores = {}
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "train.py"
    script.write_text(SCRIPT)
    for processes in (1, 2):
        out = Path(folder) / f"network{processes}"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        subprocess.run([*launch, script, out], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        bnn = bl.load(out)
        found = bl.metrics.Classification()
        found.update(bl.predict(bnn, digits.test_x).probs, digits.test_y)
        scores[processes] = found.compute()
        print(f"{processes} processes: {scores[processes]}")

# %%
# The networks are as good as each other.

figure, axes = plt.subplots(figsize=(5, 2.5), layout="constrained")
axes.bar([f"{count} process{'es' * (count > 1)}" for count in scores], [100 * s.error for s in scores.values()])
axes.set(ylabel="test error, %")
plt.show()
