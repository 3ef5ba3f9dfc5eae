"""The blob store, in a directory and behind fsspec."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_samples import image

from dart.core.types import Image
from dart.errors import UserError
from dart.store.blobs import BlobCorrupt, BlobMissing, BlobStore


@pytest.fixture(params=["directory", "file-url", "memory", "not-atomic", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    where = {
        "s3": "",
        "directory": str(tmp_path / "blobs"),
        "file-url": f"file://{tmp_path}/blobs",
        "memory": f"memory://{uuid.uuid4().hex}",
        "not-atomic": f"local://{tmp_path}/blobs",
    }[request.param]
    made = BlobStore(where or request.getfixturevalue("s3_url"))
    yield made
    made.close()


def blob_file(directory: Path, digest: bytes) -> Path:
    return directory / digest.hex()[:2] / digest.hex()


async def test_bytes_come_back(store: BlobStore) -> None:
    images = [image(f"picture {number}", size=100 * number + 20) for number in range(30)]
    await store.put_many_async(images)
    await store.put_async(images[0])
    for one in images:
        assert store.has(one.sha256)
        assert store.size(one.sha256) == len(one.data)
        assert await store.get_async(one.sha256) == one.data
    assert await store.get_many_async(one.sha256 for one in images) == {one.sha256: one.data for one in images}


async def test_what_is_missing_is_named(store: BlobStore) -> None:
    absent = image("never stored")
    assert not store.has(absent.sha256)
    for ask in (store.get, store.size):
        with pytest.raises(BlobMissing, match=absent.sha256.hex()):
            ask(absent.sha256)
    with pytest.raises(BlobMissing):
        store.put(Image(absent.sha256, "image/png", 1, 1))


def test_an_image_without_bytes_is_fine_where_the_blob_is_held(store: BlobStore) -> None:
    full = image("full")
    empty = Image(full.sha256, "image/png", 160, 210)
    store.put_many([empty, full, empty])
    store.put(empty)
    assert store.get(full.sha256) == full.data


def test_bytes_of_another_digest_are_not_stored(store: BlobStore) -> None:
    wrong = Image(hashlib.sha256(b"one").digest(), "image/png", 1, 1, b"another")
    with pytest.raises(BlobCorrupt, match="another SHA-256"):
        store.put(wrong)
    assert not store.has(wrong.sha256)


def test_a_digest_has_32_bytes(store: BlobStore) -> None:
    with pytest.raises(ValueError, match="32 raw bytes"):
        store.get(b"abc")


def test_a_corrupt_blob_is_noticed_and_a_cut_one_is_mended(tmp_path: Path) -> None:
    store, one = BlobStore(tmp_path), image("one")
    store.put(one)
    path = blob_file(tmp_path, one.sha256)
    path.write_bytes(one.data[:-1] + b"!")
    with pytest.raises(BlobCorrupt, match=one.sha256.hex()):
        store.get(one.sha256)
    path.write_bytes(b"")  # what a power failure leaves
    with pytest.raises(BlobCorrupt):
        store.get(one.sha256)
    store.put(one)
    assert store.get(one.sha256) == one.data


def test_what_is_held_is_not_written_again(tmp_path: Path) -> None:
    store, one = BlobStore(tmp_path), image("one")
    store.put(one)
    inode = blob_file(tmp_path, one.sha256).stat().st_ino
    store.put(one)
    assert blob_file(tmp_path, one.sha256).stat().st_ino == inode
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([one.sha256.hex()[:2], "tmp"])


def test_many_threads_store_the_same_blobs(tmp_path: Path) -> None:
    stores = [BlobStore(tmp_path), BlobStore(tmp_path)]
    images = [image(f"{number}", 50_000) for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: stores[number % 2].put_many(images), range(16)))
    assert all(stores[0].get(one.sha256) == one.data for one in images)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_a_dead_writer_left_is_swept_and_a_living_one_is_let_be(tmp_path: Path) -> None:
    BlobStore(tmp_path)
    old, young = tmp_path / "tmp" / "1-0", tmp_path / "tmp" / "2-0"
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    BlobStore(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == [young]


def test_a_place_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="name a writable one"):
        BlobStore(tmp_path / "file" / "blobs")
    with pytest.raises(UserError, match=r"nowhere://x.*install the driver"):
        BlobStore("nowhere://x")
