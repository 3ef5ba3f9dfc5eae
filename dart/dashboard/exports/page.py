"""The player as one HTML file: `static/export.html` (built from web/) with the trajectory and its screenshots in it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter

from dart.core.json_text import to_json
from dart.errors import UserError
from dart.inspection.records import TrajectoryDetail

TEMPLATE = Path(__file__).parents[1] / "static" / "export.html"
PLACE = '<script type="application/json" id="trajectory"></script>'
_DETAIL = TypeAdapter(TrajectoryDetail)


def page(detail: TrajectoryDetail, screenshots: Mapping[str, tuple[bytes, str]], *, ended: bool) -> bytes:
    """`ended`: its run is over. Raises UserError where the pages have not been built."""
    try:
        template = TEMPLATE.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{TEMPLATE} is missing: build the pages with `make web`") from None
    images = {
        digest: f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        for digest, (data, media_type) in screenshots.items()
    }
    told = f'{{"detail": {_DETAIL.dump_json(detail).decode()}, "images": {to_json(images)}, "ended": {to_json(ended)}}}'
    # Texts in it are a model's or a world's own: none may end the script element.
    safe = told.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    before, _, after = template.partition(PLACE)
    return f"{before}{PLACE.replace('><', f'>{safe}<')}{after}".encode()
