"""Texts that want to be more than text."""

from __future__ import annotations

_MARKS = "\N{COMBINING ACUTE ACCENT}\N{COMBINING DIAERESIS}" * 400
_CORE = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror=window.pwned=1>",
    "<svg/onload=window.pwned=1>",
    "</svg><script>window.pwned=1</script>",
    "</style><script>window.pwned=1</script>",
    "</title><script>window.pwned=1</script>",
    "</textarea><script>window.pwned=1</script>",
    '"><script>window.pwned=1</script>',
    "'><script>window.pwned=1</script>",
    '" onmouseover="window.pwned=1" x="',
    "javascript:window.pwned=1",
    "<iframe src='https://example.com/'></iframe>",
    "<link rel=stylesheet href=https://example.com/x.css>",
    "<meta http-equiv=refresh content='0;url=https://example.com/'>",
    "<base href=https://example.com/>",
    "<style>@import 'https://example.com/x.css'; * { display: none }</style>",
    "<object data=https://example.com/x.swf></object>",
    "<details open ontoggle=window.pwned=1>",
    "<body onload=window.pwned=1>",
    "<math><mtext><script>window.pwned=1</script>",
    "<template><script>window.pwned=1</script></template>",
    "<!-- --><script>window.pwned=1</script><!--",
    "<![CDATA[<script>window.pwned=1</script>]]>",
    "&lt;script&gt;window.pwned=1&lt;/script&gt;",
    "&#60;script&#62;window.pwned=1",
    "{{ 7 * 7 }}{% for x in y %}",
    "{{ ''.__class__.__mro__ }}",
    "${7*7} #{7*7} <%= 7*7 %>",
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
    "\u0e01" * 900,
    "url(https://example.com/x.png)",
    "expression(window.pwned=1)",
    "data:text/html,<script>window.pwned=1</script>",
    "</div></section></main></body></html><script>window.pwned=1</script>",
    "<plaintext>",
    "<xmp><script>window.pwned=1</script>",
)
HOSTILE: tuple[str, ...] = tuple(
    form(text)
    for form in (str, str.upper, lambda text: f"x {text} y", lambda text: text * 2)
    for text in _CORE
)
"""200 of them."""
