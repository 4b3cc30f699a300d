"""Tests that a swapped Hugging Face GPT-2 divided by tensor parallelism has the results of the undivided one.

A fixture starts four processes. In most ways two groups of two processes do the same. The tests read the results of
process 0.
"""

import os
import tempfile
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gptkernels
from gptkernels.optim import AdamW
from gptkernels.parallel import CheckpointWriter, shard_placement, tensor_parallel, whole_state_dict
from processes import run_case, run_processes
from small_models import assert_equal
from swapped import hf_config, needs_transformers, randomised, transformers

pytestmark = [
    needs_transformers,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.xdist_group("distributed"),
]

V, T, STEPS = 100, 16, 3
HAS_TRAINER = (
    transformers is not None
    and tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 19)
    and find_spec("accelerate") is not None
)


def config(**changes):
    return hf_config(**{"vocab_size": V, "n_head": 4, "n_positions": T, **changes})


def make_model(dtype=torch.float64, return_logits=True, **changes):
    model = randomised(transformers.GPT2LMHeadModel(config(**changes)))
    return gptkernels.swap(model.to(dtype), return_logits=return_logits)


def make_batch(seed=0):
    tokens = torch.randint(V, (4, T), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[1, -5:] = -100
    return tokens, labels


def mesh_of_two():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def divided(model):
    return tensor_parallel(model, mesh_of_two()["tp"])


def train(model, dtype=None, rows=slice(None), **options):
    """Return the losses, the gradients' norms, and the parameters at the end."""
    optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    torch.manual_seed(7)
    model.train()
    losses, norms = [], []
    for step in range(STEPS):
        tokens, labels = (t[rows].contiguous() for t in make_batch(step))
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(input_ids=tokens, labels=labels, **options).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        norms.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    state = whole_state_dict(model) if any(isinstance(p, DTensor) for p in model.parameters()) else model.state_dict()
    return losses, norms, {name: t.clone() for name, t in state.items()}


# Each way has the options of the model and of ``train``.
WAYS = {
    "two": ({}, {}),
    "uneven": ({"n_head": 3, "n_embd": 24, "n_inner": 50}, {"attention_mask": torch.ones(4, T)}),
    "no_logits": ({"return_logits": False}, {"num_items_in_batch": torch.tensor(9)}),
    "options": ({"activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True}, {"return_dict": True}),
    "dropout": ({"dropout": 0.3}, {}),
    "recomputed": ({"dropout": 0.3, "return_logits": "detached"}, {}),
    "autocast": ({}, {"dtype": torch.bfloat16}),
}


def model_of(way):
    changes, options = WAYS[way]
    return make_model(torch.float32 if "dtype" in options else torch.float64, **changes)


def run_way(way):
    model = divided(model_of(way))
    if way == "recomputed":
        model.gradient_checkpointing_enable()
    return train(model, **WAYS[way][1])


def with_fsdp():
    mesh = mesh_of_two()
    model = divided(make_model(n_head=3, n_embd=24))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh["dp"], shard_placement_fn=shard_placement)
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=shard_placement)
    rank = mesh["dp"].get_local_rank()
    return train(model, rows=slice(2 * rank, 2 * rank + 2), num_items_in_batch=9)


def other_parameters():
    return {name: 1.5 * t for name, t in make_model().state_dict().items()}


def logits_and_parameters(folder):
    """Load a whole state dict, by copying, by assignment and on the meta device; write and read the model."""
    state, models = other_parameters(), [divided(make_model(torch.float32)).double() for _ in range(2)]
    with torch.device("meta"):
        model = gptkernels.swap(transformers.GPT2LMHeadModel(config()).double())
    models.append(divided(model).to_empty(device="cpu"))
    for i, model in enumerate(models):
        model.load_state_dict(state, assign=i == 1)
        assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        logits = models[0].eval()(make_batch()[0], return_dict=False)
    models[0].save_pretrained(folder)
    dist.barrier()
    written = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    states = [whole_state_dict(model) for model in models]
    return logits, [*states, dict(written.state_dict())], type(models[0]).__name__


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        tokens = torch.randint(V, (T,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def with_trainer(model, folder):
    """Return the losses and gradients' norms of three steps with a Trainer."""
    arguments = transformers.TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, use_cpu=True,
        save_strategy="steps", save_steps=2, save_only_model=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows())
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history[:STEPS]]


def divided_with_trainer(folder):
    import accelerate

    # accelerate refuses tensor parallelism on CPUs, although it does nothing else for a divided model than on GPUs
    accelerate.ParallelismConfig._validate_accelerator = lambda *_: None
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    model = make_model(torch.float32, dropout=0.1)
    return with_trainer(tensor_parallel(model, init_device_mesh("cpu", (4,))), folder)


def refusals():
    """Return the errors of models that cannot be divided, and of calls of a divided model."""
    tokens, labels = make_batch()
    model = divided(make_model())
    padding = torch.ones(4, T)
    padding[0, -1] = 0
    calls = {
        "another class": lambda: divided(transformers.GPT2LMHeadModel(hf_config())),
        "hook": lambda: divided(hooked(make_model())),
        "untied": lambda: divided(make_model(tie_word_embeddings=False)),
        "configuration": lambda: divided(make_model(add_cross_attention=True)),
        "one head": lambda: divided(make_model(n_head=1)),
        "unswap": lambda: gptkernels.unswap(model),
        "padding": lambda: model(tokens, attention_mask=padding),
        "mask": lambda: model(tokens, attention_mask=torch.ones(4, 1, T, T)),
        "checkpoint": lambda: CheckpointWriter(".").save(config={}, model=model, optimizer=None, trainer={}),
        "cache": lambda: model(tokens, use_cache=True),
        "attentions": lambda: model(tokens, output_attentions=True),
        "positions": lambda: model(tokens, position_ids=tokens),
        "embeddings": lambda: model(inputs_embeds=torch.zeros(4, T, 32)),
        "odd": lambda: model(tokens[:1, :15]),
        "generate": lambda: model.generate(tokens, max_new_tokens=1),
        "hook later": lambda: hooked(model)(tokens),
        "hooked embedding": lambda: hooked(divided(make_model()), "wte")(tokens),
        "loss": lambda: with_loss(model)(tokens, labels=labels),
    }
    return {name: error_of(call) for name, call in calls.items()}


def error_of(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def hooked(model, name="h.1.mlp"):
    model.transformer.get_submodule(name).register_forward_hook(lambda *_: None)
    return model


def with_loss(model):
    model.loss_function = lambda *_, **__: 0
    return model


def run_all(folder):
    found = {way: run_case(way, run_way, way) for way in WAYS}
    return found | {
        "fsdp": run_case("fsdp", with_fsdp),
        "logits": run_case("logits", logits_and_parameters, f"{folder}/written"),
        "refusals": refusals(),
        "trainer": HAS_TRAINER and run_case("trainer", divided_with_trainer, f"{folder}/trainer"),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_processes(run_all, 4, str(tmp_path_factory.mktemp("huggingface")))[0]


def assert_equal_training(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)  # losses and norms are float32
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    assert found[2].keys() == expected[2].keys()
    for name, t in expected[2].items():
        torch.testing.assert_close(found[2][name], t, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("way", WAYS)
def test_a_divided_model_trains_as_the_undivided_model(way, results):
    expected = train(model_of(way), **WAYS[way][1])
    if way == "autocast":
        assert results[way][0] == pytest.approx(expected[0], rel=2e-3)
    else:
        assert_equal_training(results[way], expected)


def test_fsdp_of_a_divided_model(results):
    _, norms, state = results["fsdp"]
    expected = train(make_model(n_head=3, n_embd=24), num_items_in_batch=18)
    assert norms == pytest.approx(expected[1], rel=1e-6)
    for name, t in expected[2].items():
        torch.testing.assert_close(state[name], t, rtol=1e-8, atol=1e-8)


def test_logits_and_parameters(results):
    (logits,), (*states, written), name = results["logits"]
    model, expected = make_model().eval(), other_parameters()
    model.load_state_dict(expected)
    torch.testing.assert_close(logits, model(make_batch()[0]).logits, rtol=1e-12, atol=1e-12)
    assert name == "GPT2LMHeadModel"
    for state in (*states, written):
        assert_equal(state, expected)


@pytest.mark.skipif(not HAS_TRAINER, reason="needs transformers 5.19 and accelerate")
def test_trainer(results):
    with tempfile.TemporaryDirectory() as folder:
        expected = with_trainer(make_model(torch.float32, dropout=0.1), folder)
    for found, one in zip(results["trainer"], expected, strict=True):
        assert found == pytest.approx(one, rel=1e-5)


def test_refusals(results):
    prefix = "GPT2LMHeadModel: a tensor-parallel model does not support "
    for name, expected in {
        "another class": "tensor_parallel: the model must be a GPT2, or a Hugging Face GPT2LMHeadModel that "
        "gptkernels.swap has swapped, got GPT2LMHeadModel",
        "hook": "tensor_parallel: a part of layer 1 was replaced or hooked",
        "untied": "tensor_parallel: the LM head must be tied to the token embedding",
        "unswap": "gptkernels.unswap: the model was given another class since the swap",
        "padding": prefix + "an attention_mask that is not (B, T) or has zeros",
        "mask": prefix + "an attention_mask that is not (B, T) or has zeros",
        "checkpoint": "a checkpoint of a divided Hugging Face model is not supported: use its save_pretrained",
        "cache": prefix + "use_cache",
        "attentions": prefix + "output_attentions",
        "positions": prefix + "position_ids",
        "embeddings": prefix + "inputs_embeds",
        "odd": "tensor_parallel: the number of tokens must be a multiple of the 2 processes, got (1, 15)",
        "hook later": "tensor_parallel: a part of a layer was replaced or hooked",
        "hooked embedding": "tensor_parallel: wte was replaced or hooked",
        "loss": prefix + "another loss_function: compute the loss from the logits",
    }.items():
        assert results["refusals"][name] == expected
    assert "cross-attention" in results["refusals"]["configuration"]
    heads = "2 processes cannot divide dimension 2 of transformer.h.0.attn.c_attn.weight, (32, 3, 1, 32)"
    assert heads in results["refusals"]["one head"]
    assert results["refusals"]["generate"].startswith(prefix)
