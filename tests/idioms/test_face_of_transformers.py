"""A model of transformers: ``.config``, logits, ``generate`` and ``save_pretrained``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed
from plans import close, named, output_plan

from mixmesh.errors import InputError
from mixmesh.runtime.parallel import parallelize

KINDS = ("data_parallel", "fsdp")


def tiny():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double().train()


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 20, (12, 6), generator=torch.Generator().manual_seed(0))
    return dict(input_ids=ids, labels=ids)


def check_a_model_of_transformers(_) -> None:
    for kind in KINDS:
        single, plan = tiny(), output_plan(kind, tiny(), tokens(), ("logits",))
        model, _ = parallelize(tiny(), None, plan, device="cpu", timeout_s=60, check_model=False)
        assert isinstance(model, type(single)) and model.config.n_embd == 8
        assert model.num_parameters() == single.num_parameters() and model.dtype == torch.float64
        out, want = model(**tokens()), single(**tokens())
        # the model computes its loss in float32, whatever its weights
        torch.testing.assert_close(out.loss, want.loss, rtol=1e-6, atol=1e-6)
        close(out.gather("logits"), want.logits.detach(), kind)
        assert list(out.keys()) == list(want.keys()) and out[0] is out.loss and out["logits"] is out.logits
        prompt = tokens()["input_ids"][:2, :3]
        for name in ("generate", "save_pretrained"):
            with pytest.raises(InputError, match=f"{name} needs the whole model"):
                getattr(model, name)(prompt)
        with model.whole() as m, tempfile.TemporaryDirectory() as folder:
            got = m.eval().generate(prompt, max_new_tokens=3, do_sample=False)
            assert torch.equal(got, single.eval().generate(prompt, max_new_tokens=3, do_sample=False))
            if dist.get_rank() == 0:
                m.save_pretrained(folder)
                assert any(Path(folder).glob("*.safetensors"))
                read = type(single).from_pretrained(folder, dtype=torch.float64)
                close(read.lm_head.weight.detach(), single.lm_head.weight.detach())


IDIOMS = named(check_a_model_of_transformers)


@pytest.mark.parametrize("name", IDIOMS)
def test_transformers(outcomes, name):
    assert_passed(outcomes[name])
