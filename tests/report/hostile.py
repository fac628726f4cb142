"""Texts that try to act as markup or control codes."""

from __future__ import annotations

_SCRIPT = "<script>document.documentElement.id='pwned'</script>"
_EVENT = "document.documentElement.id='pwned'"
_MARKS = "\N{COMBINING ACUTE ACCENT}\N{COMBINING DIAERESIS}" * 400
_CORE = (
    _SCRIPT,
    f'<img src=x onerror="{_EVENT}">',
    f'<svg/onload="{_EVENT}">',
    f"</svg>{_SCRIPT}",
    f"</style>{_SCRIPT}",
    f"</title>{_SCRIPT}",
    f'">{_SCRIPT}',
    f"'>{_SCRIPT}",
    f'" onmouseover="{_EVENT}" x="',
    "<iframe src='https://example.com/'></iframe>",
    "<meta http-equiv=refresh content='0;url=https://example.com/'>",
    "<base href=https://example.com/>",
    "<style>@import 'https://example.com/x.css'; * { display: none }</style>",
    f'<details open ontoggle="{_EVENT}">',
    f"<math><mtext>{_SCRIPT}",
    f"<!-- -->{_SCRIPT}<!--",
    f"<![CDATA[{_SCRIPT}]]>",
    "&lt;script&gt;document.title=1&lt;/script&gt;",
    "{{ 7 * 7 }}{% for x in y %}",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[2J",
    "\x9b31m\x9d0;title\x9c",
    "a\x00b\x08\x08\x7f\r\rc",
    "\u202egnirts desrever\u202c \u2066isolated",
    "\ufeff\u200e\u200f\u061c\u2028next\u2029next",
    "\ud800 a lone surrogate",
    "\ue000\U000f0000\ufffe no characters",
    "marks " + "e" + _MARKS,
    "W" * 5000,
    "two words " * 2000,
    "\n" * 300 + "far below",
    "\t" * 300 + "far right",
    "\u4e2d\u6587" * 600,
    "\u0645\u0631\u062d\u0628\u0627 <b>rtl</b> " * 60,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467" * 200,
    f"</div></section></main></body></html>{_SCRIPT}",
    "<plaintext>",
)
HOSTILE: tuple[str, ...] = tuple(
    form(text) for form in (str, str.upper, lambda text: f"x {text} y") for text in _CORE
)
