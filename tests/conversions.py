"""Makes models and writes them in every supported file format, for the tests of conversion."""

import dataclasses

import pytest
import torch

import published
from gptkernels.checkpoint import save_model, save_training_state
from gptkernels.convert import load
from gptkernels.models import GPT2, GPT2Config

CONFIG = GPT2Config(block_size=8, vocab_size=50, n_layer=2, n_head=2, n_embd=16)
WTE, HEAD = "transformer.wte.weight", "lm_head.weight"
TARGETS = {"huggingface": "model", "nanogpt": "ckpt.pt", "llm.c": "model.bin", "gptkernels": "model.safetensors"}


def make_model(seed=0, dtype=torch.float32, **changes):
    """Return a model with noise on its initial parameters, so that a test notices a lost parameter."""
    torch.manual_seed(seed)
    model = GPT2(dataclasses.replace(CONFIG, padded_vocab_size=None, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.lm_head.weight[model.config.vocab_size :] = 0
    return model.to(dtype)


def unpad(model):
    """Return the model's state dict with the embedding cut to ``vocab_size`` rows, as ``load`` returns it."""
    state = model.state_dict()
    return state | {name: state[name][: model.config.vocab_size] for name in (WTE, HEAD)}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        assert torch.equal(found[name].contiguous().view(bits), tensor.contiguous().view(bits)), name


def expect_one_line_error(path, message, read=load):
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def write_as(form, folder, model):
    folder.mkdir(exist_ok=True)
    path = folder / TARGETS.get(form, "checkpoint.safetensors")
    state, config = unpad(model), dataclasses.asdict(model.config)
    if form == "nanogpt":
        names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
        compiled = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
        arguments = {name: config[name] for name in names}
        torch.save({"model": compiled, "model_args": arguments, "config": {"activation": config["activation"]}}, path)
    elif form == "huggingface":
        model.save_pretrained(path)
    elif form == "training":
        state = {"param_groups": [], "state": {}}
        save_training_state(path, config=model.config, model=model, optimizer=state, trainer={"step": 0})
    else:
        save_model(path, state, model.config)
    return path


def pickle_state(state, folder):
    torch.save(state, folder / "pytorch_model.bin")


def make_nanogpt(bias=True):
    torch.manual_seed(2)
    model = published.GPT(published.Config(block_size=8, vocab_size=50, n_layer=2, n_head=2, n_embd=16, bias=bias))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def nanogpt_groups(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def make_checkpoint(trained, **changes):
    optimizer = torch.optim.AdamW(nanogpt_groups(trained), lr=1e-3, betas=(0.9, 0.95))
    return {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in trained.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": dataclasses.asdict(trained.config),
        "iter_num": 7,
        "best_val_loss": torch.tensor(2.5),
        "config": {"dataset": "shakespeare_char", "learning_rate": 1e-3},
        **changes,
    }
