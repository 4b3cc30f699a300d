"""Tests that swapped GPT-2 models of Hugging Face have the results of unswapped models, with many options."""

import copy
import functools
import json

import pytest
import torch
import torch.nn.functional as F

import gptkernels
from gptkernels.block import node
from gptkernels.swapping.attention_registration import transformers_attention
from helpers import assert_close_in_scale, assert_raises
from swapped import T, V, hf_config, needs_transformers, randomised, tokens, transformers

pytestmark = needs_transformers


def make_pair(device, kind="GPT2LMHeadModel", implementation="sdpa", dtype=torch.float64, **config):
    model = getattr(transformers, kind)._from_config(hf_config(**config), attn_implementation=implementation)
    model = randomised(model).to(device, dtype).eval()
    return gptkernels.swap(copy.deepcopy(model)), model


def assert_same(a, b, mask=None):
    assert type(a) is type(b)
    for name, expected in b.items():
        found = a[name]
        if name == "past_key_values":
            if type(expected).__name__ == "EncoderDecoderCache":
                found, expected = found.self_attention_cache, expected.self_attention_cache
            for one, other in zip(found.layers, expected.layers, strict=True):
                rows = slice(None) if mask is None else mask.bool()[:, None, :, None].expand_as(other.keys)
                assert_close_in_scale(one.keys[rows], other.keys[rows], torch.float32)
                assert_close_in_scale(one.values[rows], other.values[rows], torch.float32)
        elif isinstance(expected, tuple):
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                if other is not None:
                    assert_close_in_scale(one, other, torch.float32)
        elif mask is not None and expected.dim() == 3:
            assert_close_in_scale(found[mask.bool()], expected[mask.bool()], torch.float32)
        else:
            assert_close_in_scale(found, expected, torch.float32)


def assert_same_gradients(ours, theirs):
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close_in_scale(p.grad, q.grad, torch.float32)


def make_masks(device):
    ones = torch.ones(2, T, dtype=torch.long, device=device)
    left, right, holes = ones.clone(), ones.clone(), ones.clone()
    left[0, :5], left[1, :2] = 0, 0
    right[0, -7:] = 0
    holes[1, [3, 4, 9]] = 0
    return {"ones": ones, "left": left, "right": right, "holes": holes}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["ones", "left", "right", "holes"])
def test_attention_masks_have_the_same_results(kind, implementation, device):
    ours, theirs = make_pair(device, implementation=implementation)
    mask, x = make_masks(device)[kind], tokens(device, 0)
    labels = x.masked_fill(mask == 0, -100)
    found, expected = (m(x, attention_mask=mask, labels=labels) for m in (ours, theirs))
    assert_same(found, expected, mask)
    found.loss.backward(), expected.loss.backward()
    assert_same_gradients(ours, theirs)
    through_original = {reason for kind, reason in ours.gptkernels_report.calls if kind == "GPT2Model"}
    by_theirs = implementation == "eager" and kind != "ones"
    assert through_original == ({"attention_mask with attn_implementation='eager'"} if by_theirs else set())


ONES = torch.ones(2, T, dtype=torch.long)


OPTIONS = {
    "output_hidden_states": dict(output_hidden_states=True),
    "token_type_ids": dict(token_type_ids=ONES),
    "position_ids": dict(position_ids=torch.arange(3, T + 3)[None]),
    "position_ids and mask": dict(position_ids=torch.arange(3, T + 3)[None], attention_mask=ONES),
    "packed": dict(position_ids=torch.cat([torch.arange(10), torch.arange(T - 10)])[None].expand(2, -1)),
    "a mask of 4 dimensions": dict(attention_mask=torch.ones(2, 1, T, T).tril(-1).bool() | torch.eye(T).bool()),
    "logits_to_keep": dict(logits_to_keep=3),
    "no cache": dict(use_cache=False),
    "a tuple": dict(return_dict=False),
    "labels": dict(labels=ONES),
    "labels and a count": dict(labels=ONES, num_items_in_batch=7),
    "labels and a count in a tensor": dict(labels=ONES, num_items_in_batch=torch.tensor(7)),
    "shift_labels": dict(labels=ONES, shift_labels=torch.full((2, T), 4), ignore_index=-1),
    "labels and a tuple": dict(labels=ONES, return_dict=False),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_the_same_results(name, device):
    if transformers.__version__.startswith("4.") and "shift" in name:
        pytest.skip("transformers 4.57 does not pass ignore_index to its loss")
    ours, theirs = make_pair(device)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[name].items()}
    x = tokens(device, 0)
    found, expected = ours(x, **options), theirs(x, **options)
    if isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            if isinstance(other, torch.Tensor):
                assert_close_in_scale(one, other, torch.float32)
    else:
        assert_same(found, expected)


def test_output_hidden_states_affects_one_call(device):
    ours, _ = make_pair(device)
    x = tokens(device, 0)
    ours(x, output_hidden_states=True)
    assert dict(ours.gptkernels_report.calls) == {("GPT2Model", "output_hidden_states"): 1}
    ours(x)
    assert sum(ours.gptkernels_report.calls.values()) == 1


def test_output_attentions_has_the_same_results(device):
    ours, theirs = make_pair(device, implementation="eager")
    x = tokens(device, 0)
    found, expected = ours(x, output_attentions=True), theirs(x, output_attentions=True)
    assert len(found.attentions) == 2
    assert_same(found, expected)
    reasons = {reason for _, reason in ours.gptkernels_report.calls}
    assert "output_attentions" in reasons


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "config",
    [
        dict(scale_attn_by_inverse_layer_idx=True), dict(scale_attn_weights=False), dict(reorder_and_upcast_attn=True),
        dict(n_inner=40), dict(activation_function="gelu"), dict(activation_function="relu"),
        dict(activation_function="gelu_pytorch_tanh"), dict(layer_norm_epsilon=1e-3), dict(n_head=1, n_embd=40),
        dict(tie_word_embeddings=False), dict(vocab_size=64 * 3),
    ],
    ids=str,
)  # fmt: skip
def test_configurations_have_the_same_results(config, implementation, device):
    dtype = torch.float32 if "reorder_and_upcast_attn" in config else torch.float64  # transformers refuses float64
    ours, theirs = make_pair(device, implementation=implementation, dtype=dtype, **config)
    x = tokens(device, 0)
    found, expected = ours(x, labels=x), theirs(x, labels=x)
    assert_same(found, expected)
    found.loss.backward(), expected.loss.backward()
    assert_same_gradients(ours, theirs)


def test_inputs_embeds_have_the_same_results(device):
    ours, theirs = make_pair(device)
    x = torch.randn(2, 9, 32, dtype=torch.float64, device=device)
    assert_same(ours(inputs_embeds=x), theirs(inputs_embeds=x))


def test_cross_attention_has_the_same_results(device):
    ours, theirs = make_pair(device, kind="GPT2Model", add_cross_attention=True)
    x, encoded = tokens(device, 0), torch.randn(2, 5, 32, dtype=torch.float64, device=device)
    assert_same(ours(x, encoder_hidden_states=encoded), theirs(x, encoder_hidden_states=encoded))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_has_the_same_gradients(reentrant, device):
    ours, theirs = make_pair(device)
    x = tokens(device, 0)
    for model in (ours, theirs):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        model(x, labels=x).loss.backward()
    assert_same_gradients(ours, theirs)
    assert ours.gptkernels_report.calls["GPT2Model", "gradient checkpointing"] == 1


WAYS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, top_k=20),
    "beams": dict(num_beams=3, do_sample=False),
    "beams, several": dict(num_beams=4, num_return_sequences=2, do_sample=False),
    "without cache": dict(use_cache=False, do_sample=False),
    "static cache": dict(cache_implementation="static", do_sample=False, disable_compile=True),
    "repetition penalty": dict(repetition_penalty=1.3, do_sample=False),
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["ones", "left"])
@pytest.mark.parametrize("way", WAYS)
def test_generation_gives_the_same_tokens(way, padding, implementation, device):
    ours, theirs = make_pair(device, implementation=implementation)
    x, mask = tokens(device, 0), make_masks(device)[padding]
    x = x.masked_fill(mask == 0, 0)
    found = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        found.append(model.generate(x, attention_mask=mask, max_new_tokens=12, pad_token_id=0, **WAYS[way]))
    assert torch.equal(*found)


def test_a_cache_can_be_shared_with_the_original(device):
    ours, theirs = make_pair(device)
    x = tokens(device, 0)
    whole = theirs(x).logits
    for first, second in ((ours, theirs), (theirs, ours)):
        cache = transformers.DynamicCache(config=ours.config)
        for model, begin, end in ((first, 0, 10), (second, 10, 17), (first, 17, 18), (second, 18, T)):
            out = model(x[:, begin:end], past_key_values=cache, use_cache=True)
            assert_close_in_scale(out.logits, whole[:, begin:end], torch.float32)
        assert cache.get_seq_length() == T
    out = ours(x[:, :10], use_cache=True)
    out = ours(x[:, 10:], past_key_values=out.past_key_values)
    assert_close_in_scale(out.logits, whole[:, 10:], torch.float32)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_through_the_cache(backend, device, monkeypatch):
    """If a loss depends on the cached keys and values, a layer's backward computes the layer again in eager mode."""
    torch._dynamo.reset()
    again = []
    differentiably = node._differentiably
    monkeypatch.setattr(node, "_differentiably", lambda *args: again.append(args) or differentiably(*args))
    ours, theirs = make_pair(device)
    x = tokens(device, 0)
    call = ours if backend is None else torch.compile(ours, backend=backend)
    for uses_cache in (False, True):
        for model in (ours, theirs):
            model.zero_grad()
            out = (call if model is ours else theirs)(x, labels=x, use_cache=True)
            caches = out.past_key_values.layers
            (out.loss + sum((one.keys * one.values).mean() for one in caches if uses_cache)).backward()
        assert len(again) == (len(caches) if backend is None and uses_cache else 0)
        assert_same_gradients(ours, theirs)


def test_the_users_loss_function_is_called(device):
    ours, theirs = make_pair(device)
    x = tokens(device, 0)
    logits = torch.randn(2, T, V, dtype=torch.float64, device=device)
    assert ours.loss_function is not theirs.loss_function
    for options in ({}, {"num_items_in_batch": 5}, {"shift_labels": x.roll(1, 1)}, {"ignore_index": 3}):
        a, b = (m.loss_function(logits, x, vocab_size=V, **options) for m in (ours, theirs))
        torch.testing.assert_close(a, b)
    for model in (ours, theirs):
        model.loss_function = lambda logits, labels, vocab_size, **_: F.mse_loss(logits[..., 0], labels.double())
    assert_same(ours(x, labels=x), theirs(x, labels=x))
    assert ours.gptkernels_report.calls == {("GPT2LMHeadModel", "loss_function was replaced"): 1}


@pytest.mark.parametrize("count", [None, 11])
def test_logits_can_be_omitted_in_training(count, device):
    _, theirs = make_pair(device)
    ours = gptkernels.swap(copy.deepcopy(theirs), return_logits=False)
    x = tokens(device, 0)
    options = {} if count is None else {"num_items_in_batch": count}
    assert_same(ours(x, labels=x, **options), theirs(x, labels=x, **options))
    found, expected = ours.train()(x, labels=x, **options), theirs.train()(x, labels=x, **options)
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected.loss)
    found.loss.backward(), expected.loss.backward()
    assert_same_gradients(ours, theirs)


def test_save_pretrained_writes_an_unswapped_model(tmp_path, device):
    ours, theirs = make_pair(device, dtype=torch.float32)
    ours.save_pretrained(tmp_path / "ours"), theirs.save_pretrained(tmp_path / "theirs")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0] == configs[1]
    for name in ("ours", "theirs"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert type(loaded) is transformers.GPT2LMHeadModel
        assert all(torch.equal(a, b.cpu()) for a, b in zip(loaded.parameters(), theirs.parameters(), strict=True))


def test_trainer(tmp_path, device):
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens("cpu", 0, 4)]
    final = []
    for model in make_pair(device, dtype=torch.float32):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=10, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-3, bf16=True, report_to=[], save_strategy="no", use_cpu=device.type == "cpu",
            logging_steps=1, disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        final.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        final[-1].append(trainer.evaluate()["eval_loss"])
    ours, theirs = (torch.tensor(losses) for losses in final)
    assert len(ours) == 11
    assert ours[-1] < ours[0]
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=0)


@pytest.mark.parametrize("kind", ["ones", "left", "right", "holes"])
def test_attn_implementation_has_the_same_results(kind, device):
    """The model is a Llama, in which two query heads share each head of keys and values."""
    gptkernels.register_attention("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device).eval()
    x, mask = tokens(device, 0), make_masks(device)[kind]
    expected = model(x, attention_mask=mask).logits
    tokens_before = model.generate(x, attention_mask=mask, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("gptkernels")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = model(x, attention_mask=mask).logits
    assert any(e.key == "gptkernels::scaled_dot_product_attention" for e in profile.key_averages())
    assert_close_in_scale(found[mask.bool()], expected[mask.bool()], torch.float32)
    assert torch.equal(model.generate(x, attention_mask=mask, max_new_tokens=8, do_sample=False), tokens_before)


def make_model(name, device, **options):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        name, vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, **options,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).to(device).eval()


@pytest.mark.parametrize("length", [5, T])
def test_attn_implementation_with_a_sliding_window(length, device):
    """transformers passes sliding windows in the mask."""
    gptkernels.register_attention("transformers")
    model, x = make_model("mistral", device, sliding_window=8), tokens(device, 0)[:, :length]
    expected = model(x).logits
    model.set_attn_implementation("gptkernels")
    assert_close_in_scale(model(x).logits, expected, torch.float32)


@pytest.mark.parametrize(
    ("name", "options", "call", "message"),
    [
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, {}, "s_aux"),
        ("gemma2", {"attn_logit_softcapping": 30.0}, {}, "softcap"),
        ("llama", {}, {"output_attentions": True}, "output_attentions"),
        ("llama", {}, {"cu_seq_lens_q": torch.tensor([0, 4, T])}, "cu_seq_lens_q of several sequences takes a mask"),
    ],
)
def test_attn_implementation_refuses_options_that_change_results(name, options, call, message, device):
    gptkernels.register_attention("transformers")
    model = make_model(name, device, **options)
    model.set_attn_implementation("gptkernels")
    assert_raises(ValueError, f"transformers_attention: .*{message}", model, tokens(device, 0), **call)


@pytest.mark.parametrize(
    ("keyword", "value", "is_supported"),
    [
        *((name, 1, False) for name in ("softcap", "s_aux", "sinks", "indices", "block_indices", "head_mask")),
        *((name, None, True) for name in ("softcap", "s_aux", "head_mask", "position_bias", "cache")),
        *((name, False, True) for name in ("output_attentions", "use_cache", "deterministic")),
        ("sliding_window", 6, False),
        ("sliding_window", 7, True),
        ("cu_seq_lens_q", torch.tensor([0, 7]), True),
        ("cu_seq_lens_q", torch.tensor([0, 3, 7]), False),
    ],
    ids=str,
)
def test_keywords_of_attention_are_supported_or_refused(keyword, value, is_supported, device):
    q = torch.randn(1, 2, 7, 16, device=device)
    call = functools.partial(transformers_attention, torch.nn.Identity(), q, q, q, None, **{keyword: value})
    if is_supported:
        expected = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
        assert_close_in_scale(call()[0], expected, torch.float32)
    else:
        assert_raises(ValueError, f"transformers_attention: .*{keyword}", call)


def test_attention_with_a_position_bias_calls_transformers(device, monkeypatch):
    sdpa_attention = pytest.importorskip("transformers.integrations.sdpa_attention")
    gptkernels.register_attention("transformers")
    q, bias = torch.randn(1, 2, 7, 16, device=device), torch.randn(1, 2, 7, 7, device=device)
    args = torch.nn.Identity(), q, q, q, None
    theirs = sdpa_attention.sdpa_attention_forward
    assert torch.equal(transformers_attention(*args, position_bias=bias)[0], theirs(*args, position_bias=bias)[0])
    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", lambda *args, **kwargs: None)
    message = "transformers_attention: the option position_bias is not supported"
    assert_raises(ValueError, message, transformers_attention, *args, position_bias=bias)


def test_a_swapped_model_may_have_our_attn_implementation(device):
    gptkernels.register_attention("transformers")
    ours, theirs = make_pair(device, implementation="gptkernels")
    x = tokens(device, 0)
    assert_same(ours(x, labels=x), theirs(x, labels=x))
    assert not ours.gptkernels_report.calls
