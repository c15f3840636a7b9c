"""From rows to the canonical sample: one function a format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_core.errors import ConfigError
from forge_plugins_vlm.data.config import Format, ImageTextConfig
from forge_plugins_vlm.data.references import Reference
from forge_plugins_vlm.data.rows import Row, shown
from forge_plugins_vlm.data.sample import ASSISTANT, Message, Sample
from forge_plugins_vlm.data.video import frames_of

LLAVA_IMAGE, LLAVA_VIDEO = "<image>", "<video>"
"""What stands for an image, and for a video, in LLaVA's conversations."""
_LLAVA_ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
_PARTS = ("text", "image", "video")


def sample_of(row: Row, config: ImageTextConfig) -> Sample:
    """The conversation that a row is, up to its last answer: what follows teaches nothing.

    Raises:
        ConfigError: it lacks something, or has something else there.
    """
    messages = [_merged(message) for message in _READERS[config.format](row, config)]
    last = max((number for number, one in enumerate(messages, 1) if one.role == ASSISTANT), default=len(messages))
    return Sample(messages[:last], row.where, row.name)


def _captions(row: Row, config: ImageTextConfig) -> list[Message]:
    hint = " (choose with the keys image_field and caption_field)"
    caption = row.text(row.field(config.caption_field, hint), repr(config.caption_field))
    asked: list[str | Reference] = [*_pictures(row, row.record.get(config.image_field))]
    if config.video_field is not None:
        videos = _videos(row, row.field(config.video_field, " (choose with the key video_field)"), config)
        asked += [frame for frames in videos for frame in frames]
    if config.prompt_field is not None:
        prompt = row.field(config.prompt_field, " (choose with the key prompt_field)")
        asked.append(row.text(prompt, repr(config.prompt_field)))
    return [Message("user", asked), Message(ASSISTANT, [caption])]


def _llava(row: Row, config: ImageTextConfig) -> list[Message]:
    images = [[one] for one in _pictures(row, row.record.get("image", row.record.get("images")))]
    videos = _videos(row, row.record.get("video"), config)
    of_videos = iter(videos)
    left: dict[str, Iterator[Sequence[Reference]]] = {LLAVA_IMAGE: iter(images)}
    if videos:  # as in LLaVA-Video, where <image> is a video if there is no image
        left = {LLAVA_IMAGE: iter(images) if images else of_videos, LLAVA_VIDEO: of_videos}
    signs = f"({'|'.join(left)})"
    messages, found = [], 0
    for number, turn in enumerate(row.listed("conversations"), 1):
        role = _LLAVA_ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role is None:
            roles = ", ".join(_LLAVA_ROLES)
            raise ConfigError(f"{row.where}: turn {number} must have 'from' as one of {roles}, it is {shown(turn)}")
        parts = re.split(signs, row.text(turn.get("value"), f"'value' of turn {number}"))
        if role == ASSISTANT and len(parts) > 1:
            raise ConfigError(f"{row.where}: {parts[1]!r} stands in an answer, turn {number}; remove it")
        found += len(parts) // 2
        content: list[str | Reference] = []
        for at, part in enumerate(parts):
            content += next(left[part], ()) if at % 2 else [part]
        messages.append(Message(role, content))
    if found != len(images) + len(videos) or any([*one] for one in left.values()):
        has = f"{len(images)} images" + f" and {len(videos)} videos" * bool(videos)
        raise ConfigError(f"{row.where} has {has}, and {found} times {' or '.join(map(repr, left))} in its turns")
    return messages


def _messages(row: Row, config: ImageTextConfig) -> list[Message]:
    _refuse_images_apart(row)
    messages = []
    for number, message in enumerate(row.listed("messages"), 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{row.where}: message {number} must be an object with a role, it is {shown(message)}")
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ConfigError(f"{row.where}: the content of message {number} must be text or an array of parts")
        parts = [one for part in content for one in _part(part, f"a part of message {number}", row, config)]
        messages.append(Message(message["role"], parts))
    return messages


def _refuse_images_apart(row: Row) -> None:
    """
    Raises:
        ConfigError: images stand beside messages, and no message has its own.
    """
    beside = next((name for name in ("images", "image") if row.record.get(name)), None)
    contents = [one.get("content") for one in row.listed("messages") if isinstance(one, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    if beside and not any(part.get("type") == kind and kind in part for part in parts for kind in ("image", "video")):
        raise ConfigError(
            f"{row.where}: {beside!r} stands beside 'messages', which format = \"messages\" does not read; give each "
            'image its place in a message, {"type": "image", "image": "a.png"}, or use format = "llava", with '
            "'conversations' and an <image> for each"
        )


def _part(part: Any, what: str, row: Row, config: ImageTextConfig) -> Sequence[str | Reference]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _PARTS or kind not in part:
        raise ConfigError(
            f"{row.where}: {what} must have the type text, image or video, and a key of that name, it is {shown(part)}"
        )
    if kind == "text":
        return [row.text(part["text"], what)]
    if kind == "image":
        return [row.picture(part["image"])]
    return frames_of(row.video(part["video"]), part, row.where, config)


def _turns(row: Row, _: ImageTextConfig) -> list[Message]:
    messages = []
    images: list[Reference] = _pictures(row, row.record.get("images"))
    for number, turn in enumerate(row.listed("texts"), 1):
        if not isinstance(turn, Mapping) or not {"user", ASSISTANT} <= turn.keys():
            raise ConfigError(f"{row.where}: text {number} must have 'user' and 'assistant', it is {shown(turn)}")
        asked = row.text(turn["user"], f"'user' of text {number}")
        answer = row.text(turn[ASSISTANT], f"'assistant' of text {number}")
        messages += [Message("user", [*(images if number == 1 else ()), asked]), Message(ASSISTANT, [answer])]
    return messages


def _interleaved(row: Row, _: ImageTextConfig) -> list[Message]:
    images, texts = row.listed("images"), row.listed("texts")
    if len(images) != len(texts):
        raise ConfigError(
            f"{row.where} has {len(images)} images and {len(texts)} texts; at each place one of them is null"
        )
    content: list[str | Reference] = []
    for number, (image, text) in enumerate(zip(images, texts, strict=True), 1):
        if (image is None) == (text is None):
            has = "neither an image nor a text" if image is None else "both an image and a text"
            raise ConfigError(f"{row.where} has {has} at place {number}")
        content.append(row.text(text, f"text {number}") if image is None else row.picture(image))
    return [Message(ASSISTANT, content)]


def _webvid(row: Row, config: ImageTextConfig) -> list[Message]:
    number, caption = row.field("videoid"), row.text(row.field("name"), "'name'")
    name = str(number) if isinstance(number, int) else row.text(number, "'videoid'")
    places = [row.video(f"{folder}{name}.mp4") for folder in (f"{name[:2]}/{name[:4]}/{name[:6]}/", "")]
    video = next((one for one in places if isinstance(one, Path) and one.exists()), places[0])
    return [Message("user", [*frames_of(video, row.record, row.where, config)]), Message(ASSISTANT, [caption])]


def _pictures(row: Row, value: object) -> list[Reference]:
    return [row.picture(one) for one in _listed(value)]


def _videos(row: Row, value: object, config: ImageTextConfig) -> list[Sequence[Reference]]:
    """The frames of each."""
    return [frames_of(row.video(one), row.record, row.where, config) for one in _listed(value)]


def _listed(value: object) -> list[Any]:
    """One thing, an array of them, or none."""
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]


def _merged(message: Message) -> Message:
    """Without empty texts."""
    return Message(message.role, [part for part in message.content if not isinstance(part, str) or part])


_READERS: Mapping[Format, Callable[[Row, ImageTextConfig], list[Message]]] = {
    "captions": _captions,
    "interleaved": _interleaved,
    "llava": _llava,
    "messages": _messages,
    "turns": _turns,
    "webvid": _webvid,
}
