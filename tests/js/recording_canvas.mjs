// A canvas outside a browser: it keeps the calls of its pen.

globalThis.window ??= { devicePixelRatio: 2 };

export function recordingCanvas({ width = 400, height = 120 } = {}) {
  const calls = [];
  const pen = new Proxy({}, {
    get: (target, name) => target[name] ?? ((...values) => {
      calls.push([name, ...values, { stroke: target.strokeStyle, fill: target.fillStyle, align: target.textAlign }]);
      return name === "measureText" ? { width: 6 * values[0].length } : undefined;
    }),
  });
  /** The paths that ended with `method`, as [color, calls of the path]. */
  const paths = (method, color) => {
    const found = [];
    let path = [];
    for (const [name, ...rest] of calls) {
      if (name === "beginPath") path = [];
      else if (name === "moveTo" || name === "lineTo") path.push([name, ...rest.slice(0, 2)]);
      else if (name === method) found.push([rest.at(-1)[color], path]);
    }
    return found;
  };
  return {
    clientWidth: width,
    clientHeight: height,
    getContext: () => pen,
    calls,
    strokes: (color) => paths("stroke", "stroke").filter(([each]) => each === color).map(([, path]) => path),
    fills: () => paths("fill", "fill").map(([color]) => color),
    texts: () => calls.filter(([name]) => name === "fillText").map(([, text]) => text),
    rectangles: () => calls.filter(([name]) => name === "fillRect").map(([, ...rest]) => rest.slice(0, 4)),
    numbers: () => calls.flatMap((call) => call.filter((value) => typeof value === "number")),
  };
}
