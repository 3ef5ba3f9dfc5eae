"""Where a screenshot's bytes are, who keeps them, and which pictures nobody decodes."""

from __future__ import annotations

import hashlib
import io
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from dart.core.types import Image
from dart.screenshots import header
from dart.screenshots.held import Held
from dart.screenshots.holder import Holder
from dart.screenshots.lookup import BadScreenshot, UnknownScreenshot
from dart.screenshots.picture import decoded, opened


def encoded(kind: str = "PNG", size: tuple[int, int] = (32, 48), **options: object) -> bytes:
    noise = Pillow.frombytes("RGB", size, random.Random(1).randbytes(3 * size[0] * size[1]))
    file = io.BytesIO()
    noise.save(file, kind, **options)
    return file.getvalue()


def picture(red: int, size: tuple[int, int] = (32, 48)) -> Image:
    file = io.BytesIO()
    Pillow.new("RGB", size, (red, 0, 0)).save(file, "PNG")
    return Image.of(file.getvalue(), "image/png", *size)


def bare(one: Image) -> Image:
    return replace(one, data=b"")


def bomb(width: int = 30_000, height: int = 30_000) -> Image:
    """A PNG of 69 bytes or so that claims so many pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return Image.of(data, "image/png", width, height)


# ---- what is kept ----


@settings(max_examples=300, deadline=None)
@given(
    entries=st.integers(0, 5),
    prompts=st.lists(st.lists(st.integers(0, 7), max_size=6), max_size=40),
    lost=st.sets(st.integers(0, 39)),
    bad=st.sets(st.integers(0, 7)),
)
def test_the_mirror_and_the_holder_keep_the_same_digests(
    entries: int, prompts: list[list[int]], lost: set[int], bad: set[int]
) -> None:
    """Whatever is sent, whatever of it is no picture, and whenever the coordinator forgets what it knows."""
    screens = [picture(number) for number in range(8)]
    for number in bad:
        screens[number] = replace(screens[number], width=99)
    mirror: Held[bool] = Held(entries)
    holder = Holder(entries)
    forgot = False
    for turn, prompt in enumerate(prompts):
        if turn in lost:
            mirror.forget()
            forgot = True
        sent = []
        lacking = mirror.lacking([screens[number].sha256 for number in prompt])
        for number in prompt:
            digest = screens[number].sha256
            assert digest in lacking or digest in mirror
            sent.append(bare(screens[number]) if digest in mirror else screens[number])
            mirror.note(digest, True)
        try:
            found = holder.resolve(sent)
        except BadScreenshot as error:
            assert error.digest in {screens[number].sha256 for number in bad}
        except UnknownScreenshot as error:  # what is no picture is not kept, though its place is taken
            assert error.digest in {screens[number].sha256 for number in bad}
        else:
            assert found == [screens[number] for number in prompt]
        if forgot:
            newest = list(holder.held)[-len(mirror) :] if len(mirror) else []
            assert list(mirror) == newest, "what the coordinator counts on is there"
        else:
            assert list(mirror) == list(holder.held)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 6), st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=8))
def test_what_will_be_lacking_is_known_before_anything_is_noted(
    entries: int, noted: list[int], asked: list[int]
) -> None:
    held: Held[bool] = Held(entries)
    for number in noted:
        held.note(bytes([number]), True)
    digests, before = [bytes([number]) for number in asked], list(held)
    expected, lacking = set(), held.lacking(digests)
    assert list(held) == before
    for digest in digests:
        if digest not in held:
            expected.add(digest)
        held.note(digest, True)
    assert lacking == expected


def test_the_least_recently_used_goes_first_and_looking_is_no_use() -> None:
    held: Held[str] = Held(2)
    held.note(b"a", "one")
    held.note(b"b", "two")
    assert held.get(b"a") == "one" and b"a" in held
    held.note(b"c", "three")
    assert list(held) == [b"b", b"c"]
    held.note(b"b", "two")
    held.note(b"d", "four")
    assert list(held) == [b"b", b"d"]


def test_what_is_kept_may_weigh() -> None:
    held: Held[bytes] = Held(10, len)
    held.note(b"a", b"12345")
    held.note(b"b", b"12345")
    held.note(b"b", b"123")
    held.note(b"c", b"12")
    assert list(held) == [b"a", b"b", b"c"]
    held.note(b"d", b"1")
    assert list(held) == [b"b", b"c", b"d"]
    held.note(b"e", b"12345678901")
    assert list(held) == [], "one that is larger than all the room is not kept"


def test_a_replica_gives_back_what_it_holds() -> None:
    holder = Holder(2)
    first, second, third = picture(1), picture(2), picture(3)
    holder.resolve([first, second])
    assert holder.resolve([bare(first)]) == [first]
    holder.resolve([third])
    with pytest.raises(UnknownScreenshot, match=f"screenshot {second.sha256.hex()[:12]} came without data"):
        holder.resolve([bare(second)])


def test_wrong_pictures_are_refused_and_can_be_sent_again() -> None:
    holder, good = Holder(2), picture(1)
    for bad, why in (
        (replace(good, data=good.data + b"x"), "do not have the digest"),
        (replace(good, width=33), "is 32×48 pixels, not 33×48"),
    ):
        with pytest.raises(BadScreenshot, match=why):
            holder.resolve([bad])
    assert holder.resolve([good]) == [good]


# ---- which pictures nobody decodes ----


@pytest.mark.parametrize("size", [(1, 1), (32, 48), (1920, 1080)])
@pytest.mark.parametrize(
    "write",
    [
        lambda size: encoded("PNG", size),
        lambda size: encoded("JPEG", size),
        lambda size: encoded("JPEG", size, progressive=True, exif=b"Exif\0\0" + bytes(5000)),
    ],
    ids=["png", "jpeg", "progressive jpeg"],
)
def test_the_size_is_read_from_the_header(write: Callable[[tuple[int, int]], bytes], size: tuple[int, int]) -> None:
    assert header.size_of(write(size)) == size


def test_other_formats_are_left_to_pillow() -> None:
    data = encoded("WEBP")
    assert header.size_of(data) is None
    assert decoded(Image.of(data, "image/webp", 32, 48)).size == (32, 48)
    with pytest.raises(BadScreenshot, match="is 32×48 pixels, not 5×5"):
        opened(Image.of(data, "image/webp", 5, 5))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["PNG", "JPEG"]), st.floats(0, 1), st.integers(0, 255))
def test_no_bytes_make_it_raise_anything_else(kind: str, where: float, value: int) -> None:
    whole = bytearray(encoded(kind))
    whole[int(where * (len(whole) - 1))] = value
    for data in (bytes(whole), bytes(whole[: int(where * len(whole))])):
        try:
            size = header.size_of(data)
        except header.BadHeader:
            continue
        assert size is None or size[0] * size[1] <= header.MAX_PIXELS


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_picture_that_is_cut_short_is_refused_before_it_is_decoded(kind: str, share: float) -> None:
    whole = encoded(kind, (200, 200))
    cut = Image.of(whole[: int(share * len(whole))], f"image/{kind.lower()}", 200, 200)
    with pytest.raises(BadScreenshot, match="cut short"):
        Holder(2).resolve([cut])


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    one = bomb()
    assert len(one.data) < 100
    with pytest.raises(BadScreenshot, match="claims 30000×30000 pixels"):
        Holder(2).resolve([one])
    for decode in (opened, decoded):
        with pytest.raises(BadScreenshot, match=r"30000×30000|decompression bomb"):
            decode(one)


@pytest.mark.parametrize("size", [(0, 5), (9_000, 9_000)])
def test_a_picture_has_some_pixels_and_not_too_many(size: tuple[int, int]) -> None:
    with pytest.raises(BadScreenshot, match="are accepted"):
        Holder(2).resolve([bomb(*size)])


def test_junk_and_broken_pixels_are_told_by_name() -> None:
    junk = Image(hashlib.sha256(b"not a picture").digest(), "image/png", 1, 1, b"not a picture")
    with pytest.raises(BadScreenshot, match="cannot be read"):
        decoded(junk)
    broken = bomb(32, 48)  # its header is good, and it has no pixels
    with pytest.raises(BadScreenshot, match="cannot be decoded"):
        decoded(broken)


def test_a_picture_of_endless_parts_is_refused_without_walking_through_them() -> None:
    png = encoded("PNG")
    end = png.index(b"IEND") - 4
    with pytest.raises(header.BadHeader, match="more than 65536 chunks"):
        header.size_of(png[:end] + (bytes(4) + b"tEXt" + bytes(4)) * 70_000 + png[end:])
    with pytest.raises(header.BadHeader, match="JPEG without a frame"):
        header.size_of(b"\xff\xd8" + b"\xff" * 70_000 + encoded("JPEG")[2:])


def rotated() -> bytes:
    exif = Pillow.Exif()
    exif[0x0112] = 6  # to be turned by a quarter to the right
    return encoded("JPEG", exif=exif)


def translucent(mode: str) -> bytes:
    noise = Pillow.frombytes("RGBA", (32, 48), random.Random(2).randbytes(4 * 32 * 48))
    file = io.BytesIO()
    if mode == "P":
        noise.convert("RGB").quantize(16).save(file, "PNG", transparency=3)
    else:
        noise.convert(mode).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "kind"),
    [(rotated(), "image/jpeg"), *((translucent(mode), "image/png") for mode in ("RGBA", "LA", "P")),
     (encoded(), "image/png")],
)  # fmt: skip
def test_a_picture_is_decoded_as_the_engine_decodes_it(data: bytes, kind: str) -> None:
    parse = pytest.importorskip("vllm.multimodal.parse")
    (theirs,) = parse.MultiModalDataParser().parse_mm_data({"image": Pillow.open(io.BytesIO(data))})["image"].get_all()
    ours = decoded(Image.of(data, kind, 32, 48))
    assert ours.mode == theirs.mode == "RGB" and ours.size == theirs.size
    assert ours.tobytes() == theirs.tobytes()


def test_only_formats_that_screenshots_may_have_are_decoded() -> None:
    """Pillow's other decoders, some of which start programs, are for nobody who may send a screenshot."""
    made = io.BytesIO()
    Pillow.new("RGB", (4, 3)).save(made, "TIFF")
    with pytest.raises(BadScreenshot, match="cannot be read"):
        opened(Image.of(made.getvalue(), "image/png", 4, 3))
