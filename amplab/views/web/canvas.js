// A canvas in the size of its box, at the resolution of the screen; its colors, and the scheduling of its drawings.

import { visible } from "./elements.js";

const CURVES = ["curve-2", "curve-3", "curve-4", "curve-5", "curve-6", "curve-7"];

/** The colors and the font that the style sheet gives to an element. Themes change, so read them at each drawing. */
export function palette(root) {
  const style = getComputedStyle(root);
  const names = ["ink", "soft", "grid", "accent", "faint", "warning", "paper", ...CURVES];
  const colors = names.map((name) => [name, style.getPropertyValue(`--amp-${name}`).trim()]);
  return { ...Object.fromEntries(colors), font: style.fontFamily };
}

/**
 * Return `soon`, which requests one drawing in the next frame even if it is called several times, and `cancel`.
 * JupyterLab hides the page for a moment while it changes its theme, and no observer reports when it is shown again. A
 * canvas without a width therefore tries again for six seconds.
 */
export function drawSoon(canvas, draw) {
  let frame = 0;
  let tries = 0;
  const attempt = () => {
    frame = 0;
    if (canvas.clientWidth > 0) {
      tries = 0;
      draw();
    } else if (tries < 30) {
      tries += 1;
      setTimeout(soon, 200);
    }
  };
  const soon = () => { frame ||= requestAnimationFrame(attempt); };
  return { soon, cancel: () => cancelAnimationFrame(frame) };
}

export class Surface {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
  }

  clear() {
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== pixelWidth || this.canvas.height !== pixelHeight) {
      Object.assign(this.canvas, { width: pixelWidth, height: pixelHeight });
    }
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.pen.clearRect(0, 0, width, height);
    Object.assign(this, { width, height });
  }

  line(x0, y0, x1, y1, color, dash = []) {
    this.paths([[[x0, y0], [x1, y1]]], color, 1, dash);
  }

  /** Draw several lists of points in one stroke, which costs less than one stroke for each. */
  paths(lists, color, width, dash = []) {
    const { pen } = this;
    pen.strokeStyle = color;
    pen.lineWidth = width;
    pen.setLineDash(dash);
    pen.beginPath();
    for (const points of lists) {
      points.forEach(([x, y], index) => { index === 0 ? pen.moveTo(x, y) : pen.lineTo(x, y); });
    }
    pen.stroke();
    pen.setLineDash([]);
  }

  text(text, x, y, color, align = "left", font = this.font) {
    const { pen } = this;
    pen.font = font;
    pen.fillStyle = color;
    pen.textAlign = align;
    pen.textBaseline = "middle";
    pen.fillText(visible(text), x, y);
  }

  /** Write 2 to the power of `exponent`, its right edge or its middle at `x`. */
  powerOfTwo(exponent, x, y, { soft, font }, align) {
    const small = `8.5px ${font}`;
    const width = (text, size) => {
      this.pen.font = size;
      return this.pen.measureText(text).width;
    };
    const raised = width(String(exponent), small);
    const right = align === "center" ? x + (raised + 1 + width("2", this.font)) / 2 : x;
    this.text(String(exponent), right, y - 3, soft, "right", small);
    this.text("2", right - 1 - raised, y + 1, soft, "right");
  }
}
