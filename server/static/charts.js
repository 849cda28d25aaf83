// Drawings of the live view. Colours are those of the page's own elements, so both themes work.

function prepare(canvas) {
  const scale = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height, style: getComputedStyle(canvas) };
}

export function colorOf(id) {
  return getComputedStyle(document.getElementById(id)).backgroundColor;
}

const rounded = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });
const exact = new Intl.NumberFormat();

// Counts as they are, measurements to three digits.
export function words(value, unit = "") {
  if (!Number.isFinite(value)) return "–";
  return (Number.isInteger(value) ? exact : rounded).format(value) + unit;
}

// Small charts below each other with one time axis. A lane: { name, unit, values, color, bars }.
// Values that are no number are gaps.
export function drawLanes(canvas, lanes, places) {
  const { context, width, height, style } = prepare(canvas);
  const lane = height / lanes.length;
  const step = width / places;
  context.font = `12px ${style.fontFamily}`;
  lanes.forEach(({ name, unit, values, color, bars }, index) => {
    const bottom = (index + 1) * lane - 4;
    const top = index * lane + 20;
    const finite = values.filter(Number.isFinite);
    const most = Math.max(...finite, 0);
    const y = (value) => bottom - (most ? (value / most) * (bottom - top) : 0);
    const left = width - values.length * step;
    context.fillStyle = style.color;
    context.globalAlpha = 0.15;
    context.fillRect(0, bottom, width, 1);
    context.globalAlpha = 1;
    context.textAlign = "left";
    context.fillText(name, 0, top - 7);
    context.textAlign = "right";
    const latest = values.findLast(Number.isFinite);
    context.fillText(finite.length ? `${words(latest, unit)} · most ${words(most, unit)}` : "–", width, top - 7);
    context.fillStyle = context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.beginPath();
    let drawing = false;
    values.forEach((value, place) => {
      const x = left + place * step;
      if (bars) {
        if (value) context.fillRect(x, y(value), Math.max(1, step - 1), bottom - y(value));
      } else if (Number.isFinite(value)) {
        if (drawing) context.lineTo(x + step / 2, y(value));
        else context.moveTo(x + step / 2, y(value));
        drawing = true;
      } else {
        drawing = false;
      }
    });
    context.stroke();
  });
  const said = lanes.map(({ name, unit, values }) => `${name} ${words(values.findLast(Number.isFinite), unit)}`);
  canvas.setAttribute("aria-label", `Latest values: ${said.join(", ")}`);
}

const MAP_HEIGHT = 160; // at most, in pixels
const STATES = ["reserved", "free", "cached", "used", "shared"];

// One cell a block, in order; where there are too many, one for several, with the state most in use.
export function drawBlocks(canvas, runs) {
  const states = runs.flatMap(([state, length]) => new Array(length).fill(STATES.indexOf(state))).slice(1);
  const area = canvas.clientWidth * MAP_HEIGHT;
  const size = Math.max(4, Math.min(14, Math.floor(Math.sqrt(area / states.length))));
  const columns = Math.floor(canvas.clientWidth / size);
  const rows = Math.min(Math.floor(MAP_HEIGHT / size), Math.ceil(states.length / columns));
  canvas.style.height = `${rows * size}px`;
  const { context } = prepare(canvas);
  const cells = columns * rows;
  const each = Math.ceil(states.length / cells);
  const colors = STATES.map((state) => (state === "reserved" ? "" : colorOf(`c-${state}`)));
  for (let cell = 0; cell * each < states.length; cell++) {
    context.fillStyle = colors[Math.max(...states.slice(cell * each, (cell + 1) * each))];
    context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1, size - 1);
  }
}
