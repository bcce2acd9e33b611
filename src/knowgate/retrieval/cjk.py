"""Which characters are written without spaces between words: Chinese characters and Japanese kana.

Korean is left out on purpose: it is written with spaces, so its words are words.
"""

from __future__ import annotations

import re

# For use inside a character class: kana, CJK extension A, unified, compatibility, extensions B to G.
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"

CJK_CHARACTER = re.compile(f"[{CJK}]")
