"""The transformer's promises that no reference output shows."""

from dataclasses import replace

import pytest
import torch
from lazy_h3.h3.config import DiTConfig
from lazy_h3.h3.dit import DiT, dit_class, in_groups_of_eight
from lazy_h3.h3.geometry import LatentSize
from lazy_h3.h3.packing import pack, pack_audio, patchify

TINY = DiTConfig(
    hidden_size=24,
    num_layers=2,
    num_refiner_layers=1,
    num_attention_heads=2,
    attention_head_dim=16,
    ffn_dim=40,
    text_dim=20,
    freq_dim=8,
    time_embed_hidden_dim=16,
    time_embed_dim=12,
    rope_freq_dim=2,
)
VARIANTS = {"base": TINY, "rank": replace(TINY, adaln_rank=5), "curve": replace(TINY, adaln_curve=(17, 4))}
SIZE = LatentSize(2, 4, 6, 8)


def filled(config: DiTConfig, compute: torch.dtype) -> DiT:
    """A model with small random weights in the dtypes that it asks for."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = dit_class(config)(config)
    state = {
        name: (torch.randn(tensor.shape, generator=generator) * 0.3).to(model.storage_dtype(name, compute))
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 9, 20])
def test_a_timestep_row_has_the_same_bits_alone_and_in_any_company(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    project = torch.nn.Linear(672, 1024, dtype=dtype).requires_grad_(False)
    rows = torch.randn(num_rows, 672, generator=generator).to(dtype)
    together = in_groups_of_eight(project, rows)
    assert together.shape == (num_rows, 1024)
    for row, expected in zip(rows, together, strict=True):
        assert torch.equal(in_groups_of_eight(project, row[None])[0], expected)


@torch.inference_mode()
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_modulations_of_a_whole_schedule_equal_those_of_each_step(config: DiTConfig) -> None:
    model = filled(config, torch.bfloat16)
    times = torch.linspace(0, 1, 11)
    ahead = model.blocks[0].adaln_proj(model.time_features(times))
    for i in range(0, 10, 2):
        in_step = model.blocks[0].adaln_proj(model.time_features(times[i : i + 2]))
        assert torch.equal(in_step, ahead[i : i + 2])


@torch.inference_mode()
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_features_by_which_folded_rows_are_found_have_the_same_bits_in_each_step(config: DiTConfig) -> None:
    model = filled(config, torch.bfloat16)
    times = torch.linspace(0, 1, 11)
    ahead = model.fold_inputs(times)
    for i in range(10):
        assert torch.equal(model.time_features(times[i : i + 2]), ahead[i : i + 2])


@torch.inference_mode()
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_computes_in_every_dtype_and_answers_in_fp32(config: DiTConfig, compute: torch.dtype) -> None:
    model = filled(config, compute)
    states = torch.randn(1, 5, config.text_dim, generator=torch.Generator().manual_seed(1))
    request = model.prepare(states, pack(torch.tensor([1, 0, 0, 1, 1]), SIZE))
    assert request.text.dtype == compute
    video = patchify(torch.randn(1, 24, 2, 4, 6, generator=torch.Generator().manual_seed(2)))
    audio = pack_audio(torch.randn(1, 32, 2, 8, generator=torch.Generator().manual_seed(3)))
    rows, audio_rows = model(video, audio, request, 0.25, 0.5)
    assert rows.shape == video.shape
    assert audio_rows.shape == audio.shape
    assert rows.dtype == audio_rows.dtype == torch.float32
    assert rows.isfinite().all()
    assert audio_rows.isfinite().all()


@pytest.mark.parametrize(
    ("variant", "name", "dtype"),
    [
        ("base", "blocks.0.adaln_proj.linear.weight", torch.bfloat16),
        ("rank", "blocks.0.adaln_proj.linear.bias", torch.float16),
        ("rank", "adaln_basis.weight", torch.float16),
        ("curve", "final_layer.adaln_proj.linear.weight", torch.float32),
        ("curve", "adaln_t_table", torch.float32),
        ("rank", "time_embedder.proj_in.weight", torch.float32),
        ("curve", "final_layer.norm.weight", torch.bfloat16),
        ("base", "final_layer.audio_out.bias", torch.float32),
        ("base", "rope.inv_freq", torch.float32),
    ],
)
def test_islands_keep_their_precision_beside_bf16(variant: str, name: str, dtype: torch.dtype) -> None:
    assert dit_class(VARIANTS[variant]).storage_dtype(name, torch.bfloat16) == dtype


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(1, 5, 21), (1, 4, 20), (2, 5, 20), (5, 20)])
def test_text_states_of_another_model_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs \[1, 5, 20\]"):
        filled(TINY, torch.float32).prepare(torch.zeros(shape), pack(torch.ones(5, dtype=torch.long), SIZE))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_parts_cover_every_weight_once(config: DiTConfig) -> None:
    with torch.device("meta"):
        names = dit_class(config)(config).state_dict()
    for name in names:
        assert sum(name.startswith(prefixes) for prefixes in DiT.PARTS.values()) == 1, name
