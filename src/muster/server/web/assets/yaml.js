// How does a document look as YAML? What JSON can say, as people write it; `muster apply -f` reads it.

const PLAIN = /^(?:[A-Za-z_/]|\.(?!\d))[\w./@=+-]*( [\w./@=+-]+)*$/; // .5 would be read as a number
const WORDS = /^(true|false|null|yes|no|on|off|y|n|\.nan|\.inf)$/i;

const text = (value) => (PLAIN.test(value) && !WORDS.test(value) ? value : JSON.stringify(value));
const isEmpty = (value) => typeof value === "object" && Object.keys(value).length === 0;
const scalar = (value) => (typeof value === "string" ? text(value) : Array.isArray(value) ? "[]" : typeof value === "object" && value ? "{}" : String(value));
const nested = (value) => typeof value === "object" && value !== null && !isEmpty(value);

export function yaml(value, indent = "") {
  if (!nested(value)) return `${indent}${scalar(value)}\n`;
  if (Array.isArray(value)) {
    return value.map((one) => (nested(one) ? `${indent}- ${yaml(one, `${indent}  `).slice(indent.length + 2)}` : `${indent}- ${scalar(one)}\n`)).join("");
  }
  return Object.entries(value).map(([name, one]) => `${indent}${text(name)}:${nested(one) ? `\n${yaml(one, `${indent}  `)}` : ` ${scalar(one)}\n`}`).join("");
}

/** Without what was not given: null, and what is empty. */
export const given = (document) => Object.fromEntries(Object.entries(document).filter(([, value]) =>
  (value ?? null) !== null && value !== "" && !(typeof value === "object" && isEmpty(value))));
