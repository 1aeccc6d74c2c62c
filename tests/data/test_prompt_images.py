"""Prompts with images: from files, data: URLs and Parquet; their tokens; errors that name file and line."""

from __future__ import annotations

import base64
import io
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from helpers.cases.vision_cases import PROCESSOR
from helpers.inputs.chat_tokenizer import tokenizer as chat_tokenizer
from PIL import Image as Picture
from transformers import PreTrainedTokenizerBase
from transformers.image_utils import load_image

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.image_files import ImageError, data_url
from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.data.prompt_images import PromptImages
from megatron_gvpo.data.prompts import PromptWriter, load_prompts
from megatron_gvpo.data.sources import undecoded
from megatron_gvpo.groups import Group, Prompt, group_fields, group_of
from megatron_gvpo.huggingface.image_families import text_values
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig
from megatron_gvpo.workers.messages import prompt_bytes, read_prompt

# As Qwen's templates write images.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    made = chat_tokenizer(TEMPLATE)
    made.add_special_tokens({"additional_special_tokens": MARKS})
    return made


@pytest.fixture
def images(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> PromptImages:
    """The processor has patches of 4 pixels, 2 x 2 of which are a token."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    model = dict(zip(names, tokenizer.convert_tokens_to_ids(MARKS), strict=True))
    return PromptImages(str(tmp_path), model, tokenizer)


def png(width: int, height: int, colour: str = "red") -> bytes:
    file = io.BytesIO()
    Picture.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def content(picture: Picture.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


SIXTEEN_BITS = content(Picture.new("I;16", (16, 16), 30000), "PNG")
ANIMATION = content(
    Picture.new("RGB", (16, 16), "red"),
    "GIF",
    save_all=True,
    append_images=[Picture.new("RGB", (16, 16), "blue")],
)
EPS = content(Picture.new("RGB", (16, 16)), "EPS")  # Pillow would read it with Ghostscript


def load(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    images: PromptImages | None,
    *records: Any,
    **more: Any,
) -> list[Prompt]:
    file = directory / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_file(file, tokenizer, images, **more)


def load_file(
    file: Path,
    tokenizer: PreTrainedTokenizerBase,
    images: PromptImages | None,
    longest: int = 200,
    **data: Any,
) -> list[Prompt]:
    dataset = DatasetConfig(path=str(file), images_key="images", answer_key=None)
    config = DataConfig(train=dataset, **data)
    return load_prompts(dataset, config, tokenizer, longest=longest, end_token_ids=(2,), images=images)


def test_an_image_has_its_tokens_where_the_prompt_has_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, images: PromptImages
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "wide.png").write_bytes(png(32, 16))
    url = data_url(png(16, 16, "blue"))
    records: list[dict[str, Any]] = [
        {"prompt": "is <image> like <image>?", "images": ["pictures/wide.png", url]},
        {"prompt": "look!", "images": "pictures/wide.png"},
        {"prompt": "no image"},
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
            "images": [url],
        },
    ]
    two, first, none, parts = load(tmp_path, tokenizer, images, *records)
    start, placeholder, end = tokenizer.convert_tokens_to_ids(MARKS)
    wide, square = [start, *[placeholder] * 8, end], [start, *[placeholder] * 4, end]
    assert [image.tokens for image in two.images] == [8, 4] and two.images[0].grid == (1, 4, 8)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    begin, close = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert list(two.token_ids) == [*ids(begin + "is "), *wide, *ids(" like "), *square, *ids("?" + close)]
    assert list(first.token_ids) == [*ids(begin), *wide, *ids("look!" + close)]
    assert list(parts.token_ids) == [*ids(begin + "a"), *square, *ids(close)]
    assert none.images == () and placeholder not in none.token_ids
    assert two.record["images"][1].startswith("data:image/png") and len(two.record["images"][1]) < 50
    plain = load(tmp_path, tokenizer, images, records[1], chat_template=False)[0]
    assert list(plain.token_ids) == [*wide, *ids("look!")]


def test_images_of_parquet_are_taken_as_they_are(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, images: PromptImages
) -> None:
    """The package datasets stores images so: their files' content, and a name."""
    rows = [{"prompt": "x", "images": [{"bytes": png(16, 16), "path": "gone.png"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    [prompt] = load_file(tmp_path / "data.parquet", tokenizer, images)
    coded = prompt.images[0].source.partition(",")[2]
    assert base64.b64decode(coded) == png(16, 16)


def test_images_of_a_hub_data_set_are_their_files() -> None:
    """A column of images, and one of lists of images; the other columns stay as they are."""
    datasets = pytest.importorskip("datasets")
    kinds = {
        "one": datasets.Image(),
        "many": datasets.List(datasets.Image()),
        "text": datasets.Value("string"),
    }
    file = {"bytes": png(16, 16), "path": None}
    values = {"one": [file], "many": [[file, file]], "text": ["a"]}
    rows = datasets.Dataset.from_dict(values, features=datasets.Features(kinds))
    [record] = undecoded(rows)
    assert record == {"one": data_url(png(16, 16)), "many": [data_url(png(16, 16))] * 2, "text": "a"}


def test_a_prompts_length_counts_its_images(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, images: PromptImages
) -> None:
    record = {"prompt": "x", "images": [data_url(png(32, 32))]}
    length = len(load(tmp_path, tokenizer, images, record)[0].token_ids)
    assert load(tmp_path, tokenizer, images, record, longest=length)
    with pytest.raises(DataError, match=f"line 1: the prompt has {length} tokens"):
        load(tmp_path, tokenizer, images, record, longest=length - 1)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"images": ["gone.png"]}, r"line 2: field 'images', image 1: .*gone.png: No such file"),
        ({"images": ["data.jsonl"]}, r"image 1: .*data.jsonl: not an image that Pillow knows"),
        ({"images": [data_url(png(48, 48)[:75])]}, r"line 2: field 'images', image 1: image data:"),
        ({"images": ["data:image/png;base64,???"]}, r"image 1: .* not base64"),
        ({"images": ["data:image/png;base64,"]}, r"image 1: .*it is empty"),
        ({"images": ["data:image/png;base64,\u00e9"]}, r"image 1: .* not base64"),
        ({"images": ["a\0.png"]}, r"image 1: .*null"),
        ({"images": ["/dev/zero"]}, r"image 1: image /dev/zero: not a regular file"),
        (
            {"images": [data_url(SIXTEEN_BITS)]},
            r"image 1: .*more than 8 bits a sample \(Pillow's mode I;16\)",
        ),
        ({"images": [data_url(ANIMATION)]}, r"image 1: .*it has 2 frames, and videos and animations are not"),
        ({"images": [data_url(EPS)]}, r"image 1: .*not an image that Pillow knows"),
        ({"images": [3]}, r"image 1: expected a path or a data: URL, found int"),
        ({"images": [data_url(png(4000, 4))]}, r"image 1: .*aspect ratio"),
        (
            {"prompt": "<image> and <image>", "images": [data_url(png(16, 16))]},
            r"line 2: the prompt has 2 marks <image>, and 1 images",
        ),
        ({"prompt": "a <|image_pad|>"}, r"line 2: the prompt has 1 placeholders of images as tokens, and 0"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            r"line 2: the messages have 1 parts of type image, and 0 images",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}]},
            r"line 2: message 0 of the prompt has a part that is neither text nor an image",
        ),
    ],
)
def test_errors_name_the_line_and_the_image(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    images: PromptImages,
    record: dict[str, Any],
    problem: str,
) -> None:
    with pytest.raises(DataError, match=problem):
        load(tmp_path, tokenizer, images, {"prompt": "fine"}, {"prompt": "x", **record})


def test_a_picture_is_turned_as_its_exif_data_say(tmp_path: Path, images: PromptImages) -> None:
    """As in transformers' load_image: a photo that a phone took upright is stored lying on its side."""
    exif = Picture.Exif()
    exif[0x112] = 6  # orientation: turn by 90 degrees
    file = tmp_path / "photo.jpg"
    file.write_bytes(content(Picture.new("RGB", (32, 16)), "JPEG", exif=exif))
    _, high, wide = ImageProcessor(str(tmp_path)).image(str(file)).grid
    width, height = load_image(str(file)).size
    assert (high, wide) == (8, 4)
    assert wide / high == width / height


def test_a_pipe_is_not_an_image(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, images: PromptImages
) -> None:
    """Reading one would wait for a writer."""
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png: not a regular file"):
        load(tmp_path, tokenizer, images, {"prompt": "x", "images": ["a.png"]})


def test_a_field_of_images_that_no_record_has(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, images: PromptImages
) -> None:
    """A misspelt images_key would train on the texts alone, without a word."""
    with pytest.raises(DataError, match=r"no record has an image in the field 'images' \(images_key\)"):
        load(tmp_path, tokenizer, images, {"prompt": "fine"}, {"prompt": "<image> x", "image": ["a.png"]})


def test_a_chat_as_demonstration_of_a_prompt_with_images_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, images: PromptImages
) -> None:
    solution = [{"role": "assistant", "content": "a"}]
    record = {"prompt": "x", "images": [data_url(png(16, 16))], "solution": solution}
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    keys = {"images_key": "images", "demonstration_key": "solution", "answer_key": None}
    dataset = DatasetConfig(path=str(tmp_path / "data.jsonl"), **keys)
    with pytest.raises(DataError, match=r"line 1: .* is a chat, and the prompt has images"):
        load_prompts(
            dataset, DataConfig(train=dataset), tokenizer, longest=200, end_token_ids=(2,), images=images
        )


def test_a_text_models_data_has_no_images(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="images_key=images, and the model takes no images"):
        load(tmp_path, tokenizer, None, {"prompt": "x"})


def test_text_that_a_method_adds_leaves_the_images_in_the_prompt(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, images: PromptImages
) -> None:
    [prompt] = load(tmp_path, tokenizer, images, {"prompt": "x", "images": [data_url(png(16, 16))]})
    dataset = DatasetConfig(path="unused", images_key="images")
    writer = PromptWriter(dataset, DataConfig(train=dataset), tokenizer, 200, images=images)
    longer = writer.extended(prompt, "hint")
    assert longer is not None and longer.images == prompt.images
    placeholder = tokenizer.convert_tokens_to_ids(MARKS[1])
    assert list(longer.token_ids).count(placeholder) == 4 and "xhint" in longer.text
    for draft in ("I see <image>.", f"I see {MARKS[1]}."):  # a policy may write so, and no image goes with it
        assert writer.extended(prompt, draft) is None


def test_a_file_that_changed_during_the_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (tmp_path / "a.png").write_bytes(png(16, 16))
    image = ImageProcessor(str(tmp_path)).image(str(tmp_path / "a.png"))
    read_again = partial(ImageProcessor(str(tmp_path)).pixels, image)
    assert read_again().shape == (16, 3 * 2 * 4 * 4)
    (tmp_path / "a.png").write_bytes(png(16, 16, "blue"))
    with pytest.raises(ImageError, match="has changed since the run read its data"):
        ImageProcessor(str(tmp_path)).pixels(image)


def test_checkpoints_and_reward_workers_get_the_images(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, images: PromptImages
) -> None:
    [prompt] = load(tmp_path, tokenizer, images, {"prompt": "x", "images": [data_url(png(16, 16))]})
    group = group_of(json.loads(json.dumps(group_fields(Group(prompt, [])))))
    assert group.prompt == prompt
    assert read_prompt(prompt_bytes(prompt)) == prompt


def test_both_forms_of_a_config_json_give_the_language_models_keys() -> None:
    text = {"hidden_size": 8, "vocab_size": 32, "model_type": "text", "tie_word_embeddings": True}
    new = {"model_type": "m", "vision_config": {"hidden_size": 4}, "text_config": text}
    old = {"model_type": "m", "vision_config": {"hidden_size": 4}, "hidden_size": 8, "vocab_size": 32}
    for values in (text_values(new), text_values(old)):
        assert (values["hidden_size"], values["vocab_size"], values["model_type"]) == (8, 32, "m")
    assert text_values({**new, "tie_word_embeddings": False})["tie_word_embeddings"] is False
