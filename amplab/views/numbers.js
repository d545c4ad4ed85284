// Numbers as the views write them: grouped integers, bytes, powers of two. assets.py joins this file in front of a module.

const grouped = new Intl.NumberFormat("en-US");
const integer = (value) => grouped.format(Math.round(value));

/** 1536 -> "1.5 kB"; decimal units, as in the tables of the library. */
function bytes(count) {
  if (count < 1000) return `${count} B`;
  const unit = count < 1e6 ? ["kB", 1e3] : count < 1e9 ? ["MB", 1e6] : ["GB", 1e9];
  const value = count / unit[1];
  return `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0)} ${unit[0]}`;
}

function decimal(value, digits = 4) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return value.toPrecision(digits);
}

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const raised = (exponent) => [...String(exponent)].map((digit) => SUPERSCRIPTS[digit]).join("");

/** 65536 -> "2¹⁶"; a value that is no power of two stays decimal. */
function power(value) {
  if (!(value > 0) || !Number.isFinite(value)) return decimal(value);
  const exponent = Math.log2(value);
  return Number.isInteger(exponent) ? `2${raised(exponent)}` : decimal(value, 5);
}
