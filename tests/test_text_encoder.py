from __future__ import annotations

import pytest
import torch
from golden_files import golden
from lazy_h3.h3.config import TextEncoderConfig, VisionConfig
from lazy_h3.h3.text_encoder import TextEncoder, mrope_axes
from text_encoder_fixtures import encoder, hidden_states, presentation
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

PICTURES = golden("te_tiny_mixed_ref")


class Interrupted(Exception):
    pass


def test_published_model_has_the_published_tensors_and_parameters() -> None:
    with torch.device("meta"):
        model = TextEncoder(TextEncoderConfig())
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert len(sizes) == 902
    assert sum(sizes.values()) == 25_753_095_920
    assert sum(size for name, size in sizes.items() if name.startswith("visual.")) == 595_266_800
    assert list(model.buffers()) == []


def test_every_parameter_belongs_to_a_part_and_repeated_modules_are_lists() -> None:
    model = encoder(PICTURES)
    starts = tuple(start for part in TextEncoder.PARTS.values() for start in part)
    assert all(name.startswith(starts) for name, _ in model.named_parameters())
    assert all(isinstance(model.get_submodule(name), nn.ModuleList) for name in TextEncoder.REPEATED)
    assert all(hasattr(model, method) for method in TextEncoder.ENTRY_POINTS)


def test_published_rope_sections_interleave_until_height_and_width_run_out() -> None:
    axes = mrope_axes((24, 20, 20), 64).tolist()
    assert axes == [0, 1, 2] * 20 + [0] * 4


def test_attention_never_forms_the_score_matrix() -> None:
    """A kernel that needs no L x L memory is chosen for the language model and for the tower; torch refuses if none can be."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        states = hidden_states(PICTURES, encoder(PICTURES))
    torch.testing.assert_close(states, PICTURES.output["hidden_states"], atol=1e-4, rtol=0)


def test_later_tokens_do_not_change_earlier_rows() -> None:
    model = encoder(PICTURES)
    token_ids, positions = torch.arange(9), torch.arange(9).expand(3, -1)
    whole, start = model(token_ids, positions), model(token_ids[:5], positions[:, :5])
    torch.testing.assert_close(whole[:5], start, atol=1e-5, rtol=0)


def test_every_layer_is_reported_and_a_report_can_interrupt() -> None:
    model = encoder(PICTURES)
    reports: list[tuple[int, int]] = []
    request = presentation(golden("te_tiny_text_only"), model)
    model(request.token_ids, request.position_ids, on_layer=lambda done, total: reports.append((done, total)))
    num_layers = len(model.model.layers)
    assert reports == [(done, num_layers) for done in range(1, num_layers + 1)]

    def interrupt(done: int, total: int) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        model(request.token_ids, request.position_ids, on_layer=interrupt)


def test_bfloat16_weights_give_bfloat16_states_near_the_reference() -> None:
    model = encoder(PICTURES).to(torch.bfloat16)
    with torch.inference_mode():
        states, expected = hidden_states(PICTURES, model), PICTURES.output["hidden_states"]
    assert states.dtype == torch.bfloat16
    assert (states.float() - expected).norm() / expected.norm() < 0.03


def test_encoder_without_tower_says_so_when_shown_a_picture() -> None:
    with torch.device("meta"):
        model = TextEncoder(TextEncoderConfig(num_hidden_layers=1, vision=None))
    assert not any(name.startswith("visual.") for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match="no vision tower"):
        model.encode_vision(torch.zeros(4, 1536), [(2, 2)])


def test_blocks_of_pictures_do_not_see_each_other() -> None:
    model = encoder(PICTURES)
    config = model.config.vision or VisionConfig()
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    first, second = torch.randn(2 * 4, width), torch.randn(4 * 4, width)
    together = model.encode_vision(torch.cat([first, second]), [(2, 4), (4, 4)])
    alone = model.encode_vision(second, [(4, 4)])
    torch.testing.assert_close(together.embeds[2:], alone.embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(together.deepstack[0][2:], alone.deepstack[0], atol=1e-5, rtol=0)
