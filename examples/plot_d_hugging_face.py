"""
A Hugging Face model, LoRA
==========================

Cut a language model and keep its class, then give the adapters of PEFT a posterior and let it choose their ranks. The
model here is a tiny Llama that reads characters; the calls are the same for a large one.
"""

import argparse
import inspect
import tempfile
import warnings
from pydoc_data.topics import topics

import torch
from matplotlib import pyplot as plt
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import bayeslim as bl

logging.disable_progress_bar()
warnings.filterwarnings("ignore", module="transformers")

# %%
# A batch is a dict. The entry ``labels`` holds the targets, and the model gets all other entries. The logits at one
# position meet the label at the same position, so the label is the *next* character already.


def batches(text, length=48, size=32):
    codes = torch.tensor([min(ord(character), 127) for character in text])
    rows = codes[: len(codes) // (length + 1) * (length + 1)].view(-1, length + 1)
    return [{"input_ids": part[:, :-1], "labels": part[:, 1:]} for part in rows.split(size)]


code = batches(inspect.getsource(argparse)[:60_000])  # Python's own source
code, held_out = code[:-5], code[-5:]
prose = batches("".join(topics[name] for name in sorted(topics))[:40_000])  # Python's manual
prose, held_out_prose = prose[:-5], prose[-5:]


def loss(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def perplexity(model, data):
    with torch.no_grad():
        losses = [loss(model, batch) for batch in data]
    return torch.stack(losses).mean().exp()


# %%
# Train a small model as usual.

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(6):
    for batch in code:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
model.eval()
print(f"perplexity per character: {perplexity(model, held_out):.2f}")

# %%
# Cut a fifth of all weights, as whole neurons. ``uniform`` keeps layers of the same kind equally wide, so that a config
# can describe them; ``round_to`` keeps widths that hardware likes. The result is a ``LlamaForCausalLM`` with a smaller
# config.

inputs = {"input_ids": held_out[0]["input_ids"]}
bnn = bl.bayesianize(model, bl.Laplace(), likelihood=bl.likelihoods.Categorical(), sites="*mlp*")
bnn.fit(code[:12], progress=False)
budget = bl.Budget(sparsity=0.2, uniform=True, round_to=8)
pruned = bl.prune(bnn, budget, granularity="unit", example=inputs)
slim = bl.compact(pruned, example=inputs)
print(f"{type(slim).__name__}, {config.intermediate_size} neurons became {slim.config.intermediate_size}")
print(f"perplexity without retraining: {perplexity(slim, held_out):.2f}")

with tempfile.TemporaryDirectory() as folder:
    slim.save_pretrained(folder)
    again = LlamaForCausalLM.from_pretrained(folder)
    same = torch.equal(again(**inputs).logits, slim(**inputs).logits)
    print(f"loaded again by from_pretrained: {'equal' if same else 'different'} logits")

# %%
# Now teach the model another kind of text with LoRA. Only trainable parameters are random, so the posterior is over the
# adapters alone. The recipe puts a gate on every rank, and the gates say which ranks matter: cut half of them. With
# ``recipe.budget`` in place of a number, and long enough training, ranks that the data do not need go by themselves.

lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
adapted = get_peft_model(model, lora)
recipe = bl.recipes.lora_ranks(epochs=10)
bnn = bl.bayesianize(adapted, likelihood=bl.likelihoods.Categorical(), **recipe)
bnn.fit(prose, **recipe.fit, seed=0, progress=False)
pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), **recipe.cut)
small = bl.compact(pruned, example={"input_ids": held_out_prose[0]["input_ids"]})
print(f"perplexity on prose: {perplexity(model, held_out_prose):.2f} before, ", end="")
print(f"{perplexity(small, held_out_prose):.2f} with the smaller adapter")

# %%
# ``compact`` returned a model of PEFT whose config has a ``rank_pattern``; ``small.save_pretrained`` and
# ``small.merge_and_unload`` work as ever.

ranks = small.peft_config["default"].rank_pattern
ranks = {name.removeprefix("model.").removeprefix("layers."): rank for name, rank in sorted(ranks.items())}
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.barh(list(ranks), list(ranks.values()))
axes.axvline(8, color="grey", linestyle="--", linewidth=1)
axes.set(xlabel="ranks left of 8", xlim=(0, 8.4))
axes.invert_yaxis()
plt.show()
