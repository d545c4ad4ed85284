// Numbers as the views write them, and the ticks of their axes. Nothing here touches the page.

const grouped = new Intl.NumberFormat("en-US");

/** 12345.6 -> "12,346" */
export const integer = (value) => grouped.format(Math.round(value));

/** 1536 -> "1.54 kB"; decimal units, as in the tables of the library. */
export function bytes(count) {
  if (count < 1000) return `${count} B`;
  const [unit, size] = count < 999_500 ? ["kB", 1e3] : count < 999_500_000 ? ["MB", 1e6] : ["GB", 1e9];
  const value = count / size;
  return `${value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : value.toFixed(0)} ${unit}`;
}

/** 0.123456 -> "0.1235", 0.00001 -> "1.00e-5"; NaN and infinities by name. */
export function decimal(value, digits = 4) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replace("e+", "e");
  const text = value.toPrecision(digits);
  return text.includes("e") ? value.toFixed(0) : text;
}

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

/** -12 -> "⁻¹²" */
export const raised = (exponent) => [...String(exponent)].map((digit) => SUPERSCRIPTS[digit]).join("");

/** "2^-16" in a text of the library -> "2⁻¹⁶" */
export const raisedPowers = (text) => text.replace(/\b2\^(-?\d+)(?![\d.]*\d)/g, (_, exponent) => `2${raised(exponent)}`);

/** 65536 -> "2¹⁶"; a value that is not a power of two stays decimal, with about 4 digits, and 1 is 1. */
export function power(value) {
  if (value > 0 && Number.isFinite(value) && value !== 1) {
    const exponent = Math.log2(value);
    return Number.isInteger(exponent) ? `2${raised(exponent)}` : String(value >= 1000 ? Math.round(value) : +value.toPrecision(4));
  }
  return Number.isFinite(value) ? String(value) : decimal(value);
}

/** 12.34 -> "12.3 %", 0.04 -> "<0.1 %": a share that is already in percent. */
export function percent(share) {
  if (share === 0 || share === 100) return `${share} %`;
  return share < 0.1 ? "<0.1 %" : `${share.toFixed(1)} %`;
}

/** Multiples of 1, 2 or 5 times a power of ten between `low` and `high`, about `count` of them. */
export function ticks(low, high, count) {
  const raw = (high - low) / count;
  const size = 10 ** Math.floor(Math.log10(raw));
  const gap = size * [1, 2, 5, 10].find((factor) => size * factor >= raw);
  const list = [];
  const first = Math.ceil(low / gap - 1e-9) || 0; // never -0, which would be written "-0"
  for (let index = first; index * gap <= high + gap * 1e-9; index += 1) list.push(index * gap);
  return list;
}

/** The powers of ten between `low` and `high`; 1, 2 and 5 times these if there are not two; the ends if that is no help. */
export function decades(low, high) {
  const list = (factors) => {
    const found = [];
    for (let exponent = Math.floor(Math.log10(low)); 10 ** exponent <= high; exponent += 1) {
      found.push(...factors.map((factor) => +(factor * 10 ** exponent).toPrecision(12)));
    }
    return found.filter((each) => low <= each && each <= high);
  };
  return [[1], [1, 2, 5]].map(list).find((each) => each.length > 1) ?? [low, high];
}

/** The label of a tick in few letters: 0.01, 10⁻⁴, 2e-3. */
export function tickText(tick) {
  const size = Math.abs(tick);
  if (tick === 0 || (size >= 0.00999 && size < 1e5)) return String(+tick.toPrecision(3)).replace("-", "−");
  const exponent = Math.round(Math.log10(size));
  if (tick > 0 && Math.abs(tick / 10 ** exponent - 1) < 1e-6) return `10${raised(exponent)}`;
  return tick.toExponential(0).replace("+", "");
}
