// What Python and numpy mean by operators, built-ins and methods: as much of both as translated rules use (translate.py).
"use strict";
class Vec extends Array {} // A numpy array of one axis: operators work element by element.
class Tup extends Array {} // A tuple: an array that is written with parentheses.
const vec = (values) => { const made = new Vec(values.length); for (let i = 0; i < values.length; i++) made[i] = values[i]; return made; };
const isVec = (x) => x instanceof Vec;
const plain = (x) => x !== null && typeof x === "object" && Object.getPrototypeOf(x) === Object.prototype;
const each = (operate) => (a, b) => {
  if (isVec(a)) return vec(Array.from(a, (x, i) => operate(x, isVec(b) ? b[i] : b)));
  return isVec(b) ? vec(Array.from(b, (y) => operate(a, y))) : operate(a, b);
};
const fail = (text) => { throw new Error(text); };
const same = (a, b) => {
  if (a === b) return true;
  if (typeof a === "boolean" || typeof b === "boolean") return Number(a) === Number(b) && a !== null && b !== null;
  if (a === null || b === null || typeof a !== "object" || typeof b !== "object") return false;
  const keys = Object.keys(a);
  return keys.length === Object.keys(b).length && keys.every((key) => same(a[key], b[key]));
};
const add = (a, b) => {
  if (typeof a === "string") return a + b;
  if (Array.isArray(a) && Array.isArray(b) && !isVec(a) && !isVec(b)) return [...a, ...b];
  return each((x, y) => x + y)(a, b);
};
const times = each((x, y) => x * y);
const py = {
  Words: class { constructor(words) { Object.assign(this, words); } },
  truth: (x) => (Array.isArray(x) ? (isVec(x) && x.length === 1 ? py.truth(x[0]) : x.length > 0) : plain(x) ? Object.keys(x).length > 0 : Boolean(x)),
  all_of: (first, ...rest) => rest.reduce((found, next) => (py.truth(found) ? next() : found), first),
  some_of: (first, ...rest) => rest.reduce((found, next) => (py.truth(found) ? found : next()), first),
  add,
  sub: each((x, y) => x - y),
  mul: (a, b) => (Array.isArray(a) && !isVec(a) ? Array.from({ length: Math.max(b, 0) }, () => a).flat(1) : typeof a === "string" ? a.repeat(Math.max(b, 0)) : times(a, b)),
  div: each((x, y) => x / y),
  floordiv: each((x, y) => Math.floor(x / y)),
  mod: each((x, y) => x - y * Math.floor(x / y)),
  pow: each((x, y) => x ** y),
  neg: (x) => (isVec(x) ? vec(Array.from(x, (y) => -y)) : x === 0 ? 0 : -x),
  and: each((x, y) => (typeof x === "boolean" && typeof y === "boolean" ? x && y : x & y)),
  or: (a, b) => (plain(a) ? { ...a, ...b } : each((x, y) => (typeof x === "boolean" && typeof y === "boolean" ? x || y : x | y))(a, b)),
  eq: (a, b) => (isVec(a) || isVec(b) ? each(same)(a, b) : same(a, b)),
  ne: (a, b) => (isVec(a) || isVec(b) ? each((x, y) => !same(x, y))(a, b) : !same(a, b)),
  lt: each((x, y) => x < y),
  le: each((x, y) => x <= y),
  gt: each((x, y) => x > y),
  ge: each((x, y) => x >= y),
  within: (x, all) => (plain(all) ? x in all : typeof all === "string" ? all.includes(x) : py.iter(all).some((y) => same(x, y))),
  iter: (x) => (Array.isArray(x) ? (x.constructor === Array ? x : Array.from(x)) : plain(x) ? Object.keys(x) : Array.from(x)),
  list: (x = []) => py.iter(x).slice(),
  tuple: (x = []) => Tup.from(py.iter(x)),
  dict: (x = {}) => ({ ...x }),
  at: (x, where) => {
    const found = plain(x) ? x[where] : x[where < 0 ? x.length + where : where];
    return found === undefined ? fail(`nothing at ${where}`) : found;
  },
  slice: (x, from, to) => (typeof x === "string" || !isVec(x) ? x.slice(from ?? 0, to ?? undefined) : vec(Array.from(x).slice(from ?? 0, to ?? undefined))),
  put: (x, where, value) => {
    if (where === null) for (let i = 0; i < x.length; i++) x[i] = Array.isArray(value) ? value[i] : value;
    else x[!plain(x) && where < 0 ? x.length + where : where] = value;
  },
  call: (owner, name, given) => {
    const table = typeof owner === "string" ? methods.str : isVec(owner) ? methods.vec : Array.isArray(owner) ? methods.list : plain(owner) ? methods.dict : null;
    if (table) return table[name] ? table[name](owner, ...given) : fail(`no method ${name}`);
    return given.at(-1) instanceof py.Words ? fail(`words by name for ${name}`) : owner[name](...given);
  },
  getattr: (owner, name) => (typeof owner[name] === "function" ? owner[name].bind(owner) : owner[name]),
  type: (x) => (typeof x === "boolean" ? py.bool : Number.isInteger(x) ? py.int : typeof x === "string" ? py.str : Object),
  isinstance: (x, kind) => (kind === py.int ? Number.isInteger(x) : kind === py.str ? typeof x === "string" : x instanceof kind),
  len: (x) => (plain(x) ? Object.keys(x).length : x.length),
  range: (a, b) => Array.from({ length: Math.max((b ?? a) - (b === undefined ? 0 : a), 0) }, (_, i) => i + (b === undefined ? 0 : a)),
  enumerate: (x, start = 0) => py.iter(x).map((y, i) => [i + start, y]),
  zip: (...all) => {
    const given = all.filter((x) => !(x instanceof py.Words)).map(py.iter);
    return Array.from({ length: Math.min(...given.map((x) => x.length)) }, (_, i) => given.map((x) => x[i]));
  },
  map: (change, x) => py.iter(x).map((y) => change(y)),
  sorted: (x) => py.list(x).sort((a, b) => (a < b ? -1 : a > b ? 1 : 0)),
  any: (x) => py.iter(x).some(py.truth),
  all: (x) => py.iter(x).every(py.truth),
  sum: (x) => py.iter(x).reduce((a, b) => a + Number(b), 0),
  max: (...x) => extreme(x, (a, b) => a > b),
  min: (...x) => extreme(x, (a, b) => a < b),
  abs: (x) => (isVec(x) ? vec(Array.from(x, Math.abs)) : Math.abs(x)),
  int: (x) => Math.trunc(Number(x)),
  bool: (x) => py.truth(x),
  str: (x) => (typeof x === "string" ? x : py.repr(x)),
  repr: (x) => {
    if (x === null || x === undefined) return "None";
    if (typeof x === "boolean") return x ? "True" : "False";
    if (typeof x === "string") return x.includes("'") && !x.includes('"') ? `"${x}"` : `'${x.replaceAll("\\", "\\\\").replaceAll("'", "\\'")}'`;
    if (x instanceof Tup) return `(${Array.from(x, py.repr).join(", ")}${x.length === 1 ? "," : ""})`;
    if (isVec(x)) return `[${Array.from(x, py.repr).join(" ")}]`;
    if (Array.isArray(x)) return `[${x.map(py.repr).join(", ")}]`;
    return typeof x === "object" && x.__repr__ ? x.__repr__() : String(x);
  },
};
function extreme(given, better) {
  const words = given.at(-1) instanceof py.Words ? given.pop() : {};
  const all = given.length === 1 ? py.iter(given[0]) : given;
  if (!all.length) return words.default ?? words.initial ?? fail("nothing to compare");
  const found = all.reduce((a, b) => (better(b, a) ? b : a));
  return words.initial !== undefined && better(words.initial, found) ? words.initial : found;
}
const methods = {
  str: {
    join: (x, parts) => py.iter(parts).join(x),
    replace: (x, a, b) => x.replaceAll(a, b),
    startswith: (x, y) => x.startsWith(y),
    endswith: (x, y) => x.endsWith(y),
    capitalize: (x) => x.charAt(0).toUpperCase() + x.slice(1).toLowerCase(),
    split: (x, y) => (y === undefined ? x.split(/\s+/).filter(Boolean) : x.split(y)),
    removesuffix: (x, y) => (y && x.endsWith(y) ? x.slice(0, -y.length) : x),
    removeprefix: (x, y) => (x.startsWith(y) ? x.slice(y.length) : x),
  },
  list: { append: (x, y) => void x.push(y), index: (x, y) => x.findIndex((z) => same(z, y)) },
  dict: { items: (x) => Object.entries(x), keys: (x) => Object.keys(x), values: (x) => Object.values(x), get: (x, key, other = null) => x[key] ?? other },
  vec: {
    tolist: (x) => Array.from(x),
    copy: (x) => vec(x),
    any: (x) => Array.from(x).some(Boolean),
    all: (x) => Array.from(x).every(Boolean),
    sum: (x) => Array.from(x).reduce((a, b) => a + Number(b), 0),
    min: (x, words) => extreme([Array.from(x), ...(words ? [words] : [])], (a, b) => a < b),
    max: (x, words) => extreme([Array.from(x), ...(words ? [words] : [])], (a, b) => a > b),
  },
};
const np = {
  int64: null,
  ndarray: Vec,
  array: (x) => vec(py.iter(x)),
  asarray: (x) => vec(py.iter(x)),
  ndim: (x) => (isVec(x) ? 1 : 0),
  any: (x) => (isVec(x) ? Array.from(x).some(Boolean) : Boolean(x)),
  all: (x) => (isVec(x) ? Array.from(x).every(Boolean) : Boolean(x)),
  argmax: (x) => x.findIndex((y) => Number(y) === Math.max(...Array.from(x, Number))),
  flatnonzero: (x) => vec(Array.from(isVec(x) ? x : [x]).flatMap((y, i) => (y ? [i] : []))),
  zeros_like: (x) => vec(Array.from(x, () => 0)),
  full_like: (x, value) => vec(Array.from(x, () => value)),
  zeros: (count) => vec(Array(count).fill(0)),
  maximum: each(Math.max),
  minimum: each(Math.min),
  clip: (x, low, high) => np.minimum(np.maximum(x, low), high),
  where: (test, a, b) => (isVec(test) ? vec(Array.from(test, (t, i) => { const side = t ? a : b; return isVec(side) ? side[i] : side; })) : test ? a : b),
  diff: (x, words) => { const all = words?.prepend === undefined ? Array.from(x) : [words.prepend, ...x]; return vec(all.slice(1).map((y, i) => y - all[i])); },
  cumsum: (x) => { let total = 0; return vec(Array.from(x, (y) => (total += y))); },
};
// A text in which canonical names of parameters become those of a record.
py.respell = (text, spelled) => Object.entries(spelled).reduce((found, [name, shown]) => found.replace(new RegExp(`\\b${name}\\b`, "g"), shown), text);
