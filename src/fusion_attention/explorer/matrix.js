// The picture: cells of a matrix on a canvas, a cursor, and what lies under the pointer.
"use strict";
const $ = (id) => document.getElementById(id);
const LEFT = 36, TOP = 24;
let colours = null;
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  colours = { kinds: [null, ...[1, 2, 3, 4].map((kind) => read(`--k${kind}`))], text: read("--soft"), strong: read("--text"), card: read("--card"), ring: read("--ring") };
  colours.words = colours.kinds.map((colour) => (colour ? word(colour) : 0));
}
// A colour as a pixel of 32 bits, in the byte order of this machine (little endian everywhere that browsers run).
function word(colour) {
  const digits = parseInt(colour.slice(1), 16);
  return ((255 << 24) | ((digits & 255) << 16) | (digits & 0xff00) | (digits >> 16)) >>> 0;
}
class Matrix {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.buffer = document.createElement("canvas");
    this.rows = this.keys = 1;
    this.cells = new Uint8Array(1);
    this.cursor = null;
    this.visible = true;
  }
  fill(setting, p) {
    this.rows = p.q_len.reduce((a, b) => a + b, 0);
    this.keys = p.kv_len.reduce((a, b) => a + b, 0);
    if (this.cells.length !== this.rows * this.keys) this.cells = new Uint8Array(this.rows * this.keys);
    paintKinds(setting, p, this.cells, this.keys);
    if (this.cursor && (this.cursor[0] >= this.rows || this.cursor[1] >= this.keys)) this.cursor = null;
  }
  counts() {
    let seen = 0, empty = 0, cut = 0, hidden = 0;
    for (let i = 0; i < this.rows; i++) {
      let own = 0;
      for (let j = 0; j < this.keys; j++) { const kind = this.cells[i * this.keys + j]; if (kind >= 3) own++; else if (kind === 2) cut++; else if (kind === 1) hidden++; }
      seen += own;
      if (!own) empty++;
    }
    return { seen, empty, cut, hidden };
  }
  measure() {
    const width = Math.max(this.canvas.parentElement.clientWidth, 120);
    // A frame grows with the page in it, so its height says nothing.
    const most = window === parent ? Math.max(Math.min(innerHeight * 0.7, 680), 260) : 520;
    let cell = Math.min((width - LEFT - 2) / Math.max(this.keys, 1), (most - TOP) / Math.max(this.rows, 1), 56);
    if (cell > 2) cell = Math.floor(cell * 2) / 2;
    const ratio = devicePixelRatio || 1;
    const high = Math.ceil(TOP + cell * this.rows + 2);
    const size = [Math.round(width * ratio), Math.round(high * ratio)];
    if (this.canvas.width !== size[0] || this.canvas.height !== size[1]) {
      [this.canvas.width, this.canvas.height] = size;
      this.canvas.style.height = `${high}px`;
    }
    Object.assign(this, { cell, ratio, width, high });
  }
  draw() {
    this.measure();
    const { context, cell, ratio, rows, keys } = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.high);
    this.axes();
    context.globalAlpha = this.visible ? 1 : 0.12;
    if (cell >= 7) this.drawCells(); else this.drawPixels();
    context.globalAlpha = 1;
    if (this.cursor) {
      const [i, j] = this.cursor;
      context.fillStyle = colours.ring;
      context.globalAlpha = 0.14;
      context.fillRect(LEFT, TOP + i * cell, keys * cell, Math.max(cell, 1));
      context.fillRect(LEFT + j * cell, TOP, Math.max(cell, 1), rows * cell);
      context.globalAlpha = 1;
      context.strokeStyle = colours.strong;
      context.lineWidth = 1.5;
      const side = Math.max(cell, 5);
      context.strokeRect(LEFT + j * cell + (cell - side) / 2 - 0.5, TOP + i * cell + (cell - side) / 2 - 0.5, side, side);
    }
  }
  drawCells() {
    const { context, cell, rows, keys } = this;
    const gap = cell >= 14 ? 2 : 1, round = rows * keys <= 2500 && cell >= 10 ? Math.min(5, cell / 5) : 0;
    for (let kind = 1; kind <= 4; kind++) {
      context.beginPath();
      for (let i = 0; i < rows; i++) for (let j = 0; j < keys; j++) {
        if (this.cells[i * keys + j] !== kind) continue;
        const x = LEFT + j * cell, y = TOP + i * cell;
        if (round) context.roundRect(x, y, cell - gap, cell - gap, round); else context.rect(x, y, cell - gap, cell - gap);
      }
      context.fillStyle = colours.kinds[kind];
      context.fill();
    }
  }
  drawPixels() {
    const { buffer, context, rows, keys, cell } = this;
    if (!rows || !keys) return;
    if (buffer.width !== keys || buffer.height !== rows) { buffer.width = keys; buffer.height = rows; this.image = null; }
    const own = buffer.getContext("2d");
    this.image ??= own.createImageData(keys, rows);
    const pixels = new Uint32Array(this.image.data.buffer), { words } = colours;
    for (let at = 0; at < pixels.length; at++) pixels[at] = words[this.cells[at]];
    own.putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = cell * this.ratio < 1;
    context.drawImage(buffer, LEFT, TOP, keys * cell, rows * cell);
  }
  axes() {
    const { context, cell, rows, keys } = this;
    context.fillStyle = colours.text;
    context.font = "11px system-ui, sans-serif";
    const step = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].find((n) => n * cell >= 26) ?? 2048;
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    for (let j = 0; j < keys; j += step) context.fillText(j, LEFT + (j + 0.5) * cell, TOP - 7);
    context.textAlign = "right";
    context.textBaseline = "middle";
    const down = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].find((n) => n * cell >= 18) ?? 2048;
    for (let i = 0; i < rows; i += down) context.fillText(i, LEFT - 7, TOP + (i + 0.5) * cell);
    context.textAlign = "left";
    context.font = "10px system-ui, sans-serif";
    context.fillText("q \\ k", 2, TOP - 11);
  }
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const j = Math.floor((event.clientX - box.left - LEFT) / this.cell), i = Math.floor((event.clientY - box.top - TOP) / this.cell);
    return i >= 0 && j >= 0 && i < this.rows && j < this.keys ? [i, j] : null;
  }
}
// A thumbnail of a mode's example.
function thumbnail(canvas, setting, api) {
  const p = picture(setting, api), ratio = devicePixelRatio || 1;
  const rows = p.q_len.reduce((a, b) => a + b, 0), keys = p.kv_len.reduce((a, b) => a + b, 0);
  const cells = new Uint8Array(rows * keys), context = canvas.getContext("2d");
  paintKinds(setting, p, cells, keys);
  [canvas.width, canvas.height] = [56 * ratio, 42 * ratio];
  context.scale(ratio, ratio);
  const cell = Math.min(56 / keys, 42 / rows);
  cells.forEach((kind, at) => {
    if (!kind) return;
    context.fillStyle = colours.kinds[kind];
    context.fillRect((at % keys) * cell, Math.floor(at / keys) * cell, cell - 0.75, cell - 0.75);
  });
}
