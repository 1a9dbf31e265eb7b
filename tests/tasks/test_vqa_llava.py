"""LLaVA with an adaptive tower: all fine it is transformers' model, and every misfit of images and prompts is named."""

from __future__ import annotations

import pytest
import torch

from split_core.errors import SplitError
from split_tasks.vqa.expand import IGNORED, expand
from split_tasks.vqa.llava import AdaptiveLlava
from tiny import Everywhere, Logits, images, relative
from vqa_models import tiny_llava

IMAGE, DENSE = 199, 16


def words(count: int, seed: int) -> list[int]:
    return torch.randint(3, 190, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch(prompts: list[list[int]], *, times: int, side: str = "left") -> dict[str, torch.Tensor]:
    """Padded ids and mask, with `times` placeholders for each image."""
    rows = [[x for word in prompt for x in ([word] * times if word == IMAGE else [word])] for prompt in prompts]
    longest = max(map(len, rows))
    pads = [longest - len(row) for row in rows]
    left = side == "left"
    ids = [[0] * n + row if left else row + [0] * n for row, n in zip(rows, pads, strict=True)]
    mask = [[0] * n + [1] * len(row) if left else [1] * len(row) + [0] * n for row, n in zip(rows, pads, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


ONE = [[1, *words(3, 0), IMAGE, *words(4, 1)]]
MIXED = [
    [1, IMAGE, *words(5, 2)],
    [1, *words(4, 3)],  # no image
    [1, *words(2, 4), IMAGE, *words(1, 5), IMAGE, *words(3, 6)],  # two
    [1, IMAGE, IMAGE, *words(1, 7)],  # side by side
]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("times", [1, DENSE])
@pytest.mark.parametrize("prompts", [ONE, MIXED], ids=["one", "mixed"])
def test_all_fine_logits_and_generations_are_the_unmodified_models(prompts, times: int, side: str) -> None:
    plain = tiny_llava()
    pixels = images(sum(prompt.count(IMAGE) for prompt in prompts), 56)
    dense, given = batch(prompts, times=DENSE, side=side), batch(prompts, times=times, side=side)
    with torch.no_grad():
        expected = plain(**dense, pixel_values=pixels).logits
        wrapped = AdaptiveLlava(plain, Everywhere())
        logits = wrapped(**given, pixel_values=pixels).logits
        real = dense["attention_mask"].bool()
        assert logits.shape == expected.shape
        assert relative(logits[real], expected[real]) < 1e-5
        if side == "left":
            options = {"max_new_tokens": 6, "do_sample": False}
            wanted = plain.generate(**dense, pixel_values=pixels, **options)[:, dense["input_ids"].shape[1] :]
            assert torch.equal(wrapped.generate(**given, pixel_values=pixels, **options), wanted)


@pytest.mark.parametrize("options", [{"vision_feature_layer": -1}, {"vision_feature_layer": [-1, 1, -2]}])
def test_other_layers_of_the_tower(options) -> None:
    plain, pixels = tiny_llava(**options), images(1, 56)
    dense = batch(ONE, times=DENSE)
    with torch.no_grad():
        expected = plain(**dense, pixel_values=pixels).logits
        assert relative(AdaptiveLlava(plain, Everywhere())(**dense, pixel_values=pixels).logits, expected) < 1e-5


@pytest.mark.parametrize(("tower", "count"), [("clip", DENSE + 1), ("siglip", DENSE)])
def test_the_whole_sequence_of_a_tower(tower: str, count: int) -> None:
    plain, pixels = tiny_llava(tower, vision_feature_select_strategy="full"), images(1, 56)
    dense = batch(ONE, times=count)
    with torch.no_grad():
        expected = plain(**dense, pixel_values=pixels).logits
        wrapped = AdaptiveLlava(plain, Everywhere())
        assert wrapped.dense_tokens == count
        assert relative(wrapped(**dense, pixel_values=pixels).logits, expected) < 1e-5


def test_a_tower_without_class_token_loses_no_patch_unseen() -> None:
    with pytest.raises(SplitError, match=r"would drop a patch\. Use 'full'"):
        AdaptiveLlava(tiny_llava("siglip"), Everywhere())


def test_a_batch_with_mixed_tokens_is_its_samples_one_by_one() -> None:
    wrapped = AdaptiveLlava(tiny_llava(), Logits(), budget=0.7, rule="threshold")
    pixels = images(5, 56)
    options = {"max_new_tokens": 5, "do_sample": False}
    given = batch(MIXED, times=1)
    together = wrapped.generate(**given, pixel_values=pixels, **options)
    layout = wrapped.layout
    assert layout is not None
    assert len(set(layout.lengths)) > 1
    first = 0
    for index, prompt in enumerate(MIXED):
        count = prompt.count(IMAGE)
        features = wrapped.encode(
            pixels
        )  # decisions of Logits depend on the row, so the partition is cut out of the whole
        own = features.patches.split(layout.lengths)[first : first + count]
        counts = [list(layout.lengths[first : first + count])]
        alone = expand([torch.tensor(prompt)], counts, image_token=IMAGE)
        visual = torch.cat(own) if count else None
        assert torch.equal(wrapped.reader.generate(alone, visual, **options), together[index : index + 1])
        first += count


def test_generation_with_a_cache_is_generation_without() -> None:
    wrapped = AdaptiveLlava(tiny_llava(), Logits(), rule="threshold")
    given, pixels = batch(MIXED, times=1), images(5, 56)
    options = {"max_new_tokens": 6, "do_sample": False}
    cached, plain = (wrapped.generate(**given, pixel_values=pixels, use_cache=c, **options) for c in (True, False))
    assert torch.equal(cached, plain)


def test_text_alone_is_the_language_model() -> None:
    plain = tiny_llava()
    wrapped, given = AdaptiveLlava(plain, Everywhere()), batch([[1, *words(5, 0)], [1, *words(2, 1)]], times=1)
    with torch.no_grad():
        real = given["attention_mask"].bool()
        assert relative(wrapped(**given).logits[real], plain(**given).logits[real]) < 1e-5
    with pytest.raises(SplitError, match="the batch has no images and its prompts have 1 placeholders"):
        wrapped(**batch(ONE, times=1))


def test_labels_are_expanded_with_the_prompt() -> None:
    plain, pixels = tiny_llava(), images(1, 56)
    dense, given = batch(ONE, times=DENSE), batch(ONE, times=1)
    labels = {k: torch.where(x["input_ids"] == IMAGE, IGNORED, x["input_ids"]) for k, x in (("d", dense), ("g", given))}
    expected = plain(**dense, pixel_values=pixels, labels=labels["d"]).loss
    wrapped = AdaptiveLlava(plain, Everywhere())
    torch.testing.assert_close(wrapped(**given, pixel_values=pixels, labels=labels["g"]).loss, expected)
    loss = wrapped(**dense, pixel_values=pixels, labels=labels["d"]).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert wrapped.reader.projector.linear_1.weight.grad.abs().sum() > 0
    assert wrapped.tower.vit.patch_embed.proj.weight.grad.abs().sum() > 0
    assert not any(name.startswith("reader.language") for name, _ in wrapped.named_parameters())


@pytest.mark.parametrize(
    ("prompts", "times", "count", "message"),
    [
        ([[1, 5], [1, IMAGE, 7]], 1, 2, "the batch has 2 images and its prompts have 0, 1 placeholders"),
        ([[1, IMAGE, 5], [1, IMAGE, 7]], DENSE - 1, 2, "sample 0 of the batch: 15 image placeholders are no multiple"),
        ([[1, IMAGE, 5], [1, IMAGE, 7]], DENSE, 1, "the batch has 1 image and its prompts have 16, 16 placeholders"),
    ],
)
def test_placeholders_that_do_not_fit_are_named(prompts, times: int, count: int, message: str) -> None:
    wrapped = AdaptiveLlava(tiny_llava(), Everywhere())
    with pytest.raises(SplitError, match=message):
        wrapped(**batch(prompts, times=times), pixel_values=images(count, 56))


def test_counts_that_agree_in_total_only_are_refused() -> None:
    """10 + 7 placeholders for 9 + 8 tokens would pass a check of the total."""
    prompts = [torch.tensor([1, IMAGE, IMAGE]), torch.tensor([1, 5])]
    with pytest.raises(SplitError, match="sample 0 of the batch: its prompt has 2 <image> placeholders for 1 image"):
        expand(prompts, [[9], [8]], image_token=IMAGE)
    with pytest.raises(SplitError, match="row seven: its prompt has no <image> placeholders for 1 image"):
        expand(prompts[1:], [[9]], image_token=IMAGE, names=["row seven"])


def test_too_long_is_refused_or_cut_but_never_inside_an_image() -> None:
    prompt, labels = torch.tensor([1, IMAGE, 5, 6, 7]), torch.tensor([IGNORED, IGNORED, IGNORED, 6, 7])
    with pytest.raises(SplitError, match="is too long: 20 tokens, 16 of them visual, and at most 19 are read"):
        expand([prompt], [[16]], image_token=IMAGE, limit=19)
    cut = expand([prompt], [[16]], image_token=IMAGE, limit=19, labels=[labels], truncate=True)
    assert cut.ids[0, -2:].tolist() == [5, 6]
    assert cut.labels[0, -2:].tolist() == [IGNORED, 6]
    with pytest.raises(SplitError, match="would be cut inside an image: 20 tokens"):
        expand([prompt], [[16]], image_token=IMAGE, limit=16, truncate=True)
    with pytest.raises(SplitError, match="nothing of its answer is left within 18 tokens"):
        expand([prompt], [[16]], image_token=IMAGE, limit=18, labels=[labels], truncate=True)


def test_bf16_on_cpu() -> None:
    wrapped = AdaptiveLlava(tiny_llava().bfloat16(), "entropy", budget=0.7)
    out = wrapped(**batch(MIXED, times=1), pixel_values=images(5, 56))
    assert out.logits.dtype == torch.bfloat16
    assert out.logits.isfinite().all()
    assert wrapped.layout is not None
    assert float(wrapped.layout.token_fraction.max()) <= 0.7


def test_the_projector_and_tower_follow_to_another_dtype_with_the_language_model() -> None:
    wrapped = AdaptiveLlava(tiny_llava(), Everywhere()).double()
    assert wrapped.reader.language.lm_head.weight.dtype == torch.float64
    assert wrapped(**batch(ONE, times=1), pixel_values=images(1, 56)).logits.dtype == torch.float64
