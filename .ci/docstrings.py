"""For the documentation: griffe takes `Examples:` for examples, and `Example:` for prose."""

from __future__ import annotations

import re
from typing import Any

import griffe


class OneExample(griffe.Extension):
    """Reads `Example:` as `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
