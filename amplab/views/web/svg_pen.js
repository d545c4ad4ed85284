// A pen with the calls of a canvas that the charts use, which writes SVG instead.

/** The event that asks a dashboard for a picture as SVG: detail is {within: its element, which, give: takes the text}. */
export const TAKE_CHARTS = "amp-take-charts";

const escaped = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
const rounded = (value) => Math.round(value * 100) / 100;
const ANCHORS = { left: "start", start: "start", center: "middle", right: "end", end: "end" };

export class SvgPen {
  /** `measure` is a real pen, which knows the widths of texts; `prefix` makes the names of clips unique. */
  constructor(measure, prefix = "clip") {
    this.measure = measure;
    this.prefix = prefix;
    this.parts = [];
    this.clips = [];
    this.kept = [];
    this.path = [];
    this.dash = [];
    this.clipped = null;
    Object.assign(this, { fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, lineJoin: "miter", globalAlpha: 1, font: "10px sans-serif", textAlign: "left", textBaseline: "alphabetic" });
  }

  setTransform() {}

  clearRect() {}

  save() {
    const { clipped, fillStyle, strokeStyle, lineWidth, lineJoin, globalAlpha, font, dash } = this;
    this.kept.push({ clipped, fillStyle, strokeStyle, lineWidth, lineJoin, globalAlpha, font, dash });
  }

  restore() { Object.assign(this, this.kept.pop() ?? {}); }

  beginPath() { this.path = []; }

  moveTo(x, y) { this.path.push(`M${rounded(x)} ${rounded(y)}`); }

  lineTo(x, y) { this.path.push(`${this.path.length ? "L" : "M"}${rounded(x)} ${rounded(y)}`); }

  closePath() { this.path.push("Z"); }

  rect(x, y, width, height) { this.path.push(`M${rounded(x)} ${rounded(y)}h${rounded(width)}v${rounded(height)}h${rounded(-width)}Z`); }

  /** Only whole circles are drawn. */
  arc(x, y, radius) {
    const r = rounded(radius);
    this.path.push(`M${rounded(x - radius)} ${rounded(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`);
  }

  clip() {
    this.clipped = `${this.prefix}-${this.clips.length}`;
    this.clips.push(`<clipPath id="${this.clipped}"><path d="${this.path.join("")}"/></clipPath>`);
  }

  setLineDash(dash) { this.dash = dash; }

  measureText(text) {
    this.measure.font = this.font;
    return this.measure.measureText(text);
  }

  stroke() {
    const dash = this.dash.length ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
    this.add(`<path d="${this.path.join("")}" fill="none" stroke="${escaped(this.strokeStyle)}" stroke-width="${this.lineWidth}" stroke-linejoin="${this.lineJoin}"${dash}`);
  }

  fill() { this.add(`<path d="${this.path.join("")}" fill="${escaped(this.fillStyle)}"`); }

  fillRect(x, y, width, height) {
    this.add(`<rect x="${rounded(x)}" y="${rounded(y)}" width="${rounded(width)}" height="${rounded(height)}" fill="${escaped(this.fillStyle)}"`);
  }

  fillText(text, x, y) {
    const base = this.textBaseline === "middle" ? ' dominant-baseline="central"' : "";
    this.add(`<text x="${rounded(x)}" y="${rounded(y)}" text-anchor="${ANCHORS[this.textAlign] ?? "start"}"${base} fill="${escaped(this.fillStyle)}" style="font: ${escaped(this.font)}"`, escaped(text), "text");
  }

  add(start, content = null, tag = "") {
    const clip = this.clipped ? ` clip-path="url(#${this.clipped})"` : "";
    const alpha = this.globalAlpha === 1 ? "" : ` opacity="${this.globalAlpha}"`;
    this.parts.push(`${start}${clip}${alpha}${content === null ? "/>" : `>${content}</${tag}>`}`);
  }

  /** What was drawn, without a frame. */
  get text() { return (this.clips.length ? `<defs>${this.clips.join("")}</defs>` : "") + this.parts.join(""); }
}

/** Draw what `draw` draws on a surface with a pen that writes SVG; returns its elements. */
export function drawnAsSvg(surface, draw, prefix) {
  const { pen } = surface;
  surface.pen = new SvgPen(pen, prefix);
  try {
    draw();
    return surface.pen.text;
  } finally {
    surface.pen = pen;
  }
}

/** Charts below one another, each {title, width, height, elements}, with a line of text at the end. */
export function svgPage(charts, { ink, paper, font }, foot) {
  const width = Math.max(...charts.map((chart) => chart.width));
  const gap = 22;
  const height = charts.reduce((sum, chart) => sum + chart.height + gap, 0) + gap;
  let top = 0;
  const parts = charts.map((chart) => {
    const part = `<g transform="translate(0 ${top})"><text x="4" y="15" fill="${escaped(ink)}" style="font: 600 12px ${escaped(font)}">${escaped(chart.title)}</text><g transform="translate(0 ${gap})">${chart.elements}</g></g>`;
    top += chart.height + gap;
    return part;
  });
  const last = `<text x="4" y="${top + 14}" fill="${escaped(ink)}" opacity="0.7" style="font: 10px ${escaped(font)}">${escaped(foot)}</text>`;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"><rect width="${width}" height="${height}" fill="${escaped(paper)}"/>${parts.join("")}${last}</svg>`;
}
