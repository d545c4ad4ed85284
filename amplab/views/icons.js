// Icons of the buttons, drawn as paths so that no font is needed.

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  play: "M4 2.5v11l9.5-5.5z",
  pause: "M3.5 2.5h3.2v11H3.5zM9.3 2.5h3.2v11H9.3z",
  step: "M3 2.5v11l7.5-5.5zM11 2.5h2.2v11H11z",
  reset: "M8 3V.8L4.4 4 8 7.2V5a3.9 3.9 0 1 1-3.9 3.9H2.2A5.8 5.8 0 1 0 8 3z",
  copy: "M5 1.5h8.5v10H11V14H2.5V4.5H5zM6.3 2.8v7.4h5.9V2.8zM3.8 5.8v6.9h5.9v-1.2H5V5.8z",
};

function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}
