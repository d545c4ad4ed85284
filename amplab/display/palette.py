"""The colors of widgets, plain HTML, drawings and figures, for light and dark themes.

The hues are those of Okabe and Ito, which are distinguishable with common color vision deficiencies. Some are darker
or lighter than the original, so that text in them has a contrast of at least 4.5 (WCAG 2 AA). In CSS
each color is a variable, such as ``var(--amp-float16)``.
"""

from functools import cache

__all__ = ["CURVES", "PALETTE", "palette_css"]

PALETTE: dict[str, tuple[str, str]] = {
    "float32": ("#0072b2", "#56b4e9"),
    "float16": ("#e69f00", "#e69f00"),
    "bfloat16": ("#009e73", "#009e73"),
    "float8": ("#cc79a7", "#cc79a7"),
    "other": ("#8a8a8a", "#8a8a8a"),
    "error": ("#c0123c", "#ff6b8a"),
    "warning": ("#c04f00", "#ff8a3d"),
    "note": ("#5b7190", "#9db2cc"),
    "good": ("#00795a", "#35c79b"),
    "accent": ("#0b6bb8", "#56b4e9"),
    "on-accent": ("#ffffff", "#08202e"),
    # The parts of a bit pattern.
    "sign": ("#b3430a", "#ff9a6a"),
    "exponent": ("#00704f", "#58cfa5"),
    "fraction": ("#0a63a8", "#7cbcf5"),
    # Curves in one plot. The first one has the color of the text.
    "curve-0": ("currentColor", "currentColor"),
    "curve-1": ("#0072b2", "#56b4e9"),
    "curve-2": ("#c77f00", "#e69f00"),
    "curve-3": ("#009e73", "#35c79b"),
    "curve-4": ("#b5568f", "#e08fc0"),
    "curve-5": ("#3a8fc4", "#9fd4f5"),
    "curve-6": ("#d55e00", "#ff8a3d"),
    "curve-7": ("#77777a", "#a8a8ab"),
}
"""Each color on a light background and on a dark one."""

CURVES = tuple(name for name in PALETTE if name.startswith("curve-"))

_SHOWN = ":is(.amplab, .amp-dashboard, .amplab-bits, .amplab-plain)"
_LIGHT_PAGES = ':is([data-jp-theme-light="true"], .vscode-light)'
_DARK_PAGES = ':is([data-jp-theme-light="false"], .vscode-dark)'


@cache
def palette_css() -> str:
    """Return the palette as CSS variables that follow the theme of JupyterLab or VS Code, else the system's.

    >>> print(palette_css()[:77])
    :is(.amplab, .amp-dashboard, .amplab-bits, .amplab-plain) { --amp-float32: #0
    """
    light, dark = (
        " ".join(f"--amp-{name}: {colors[ground]};" for name, colors in PALETTE.items()) for ground in (0, 1)
    )
    return (
        f"{_SHOWN} {{ {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ {_SHOWN} {{ {dark} }} }}\n"
        f"{_LIGHT_PAGES} {_SHOWN} {{ {light} }}\n"
        f"{_DARK_PAGES} {_SHOWN} {{ {dark} }}\n"
    )
