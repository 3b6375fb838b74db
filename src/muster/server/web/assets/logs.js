// What do ranks write? The end of it, then every line as it comes; one reader, which starts again after an interruption.

import { pieces, trainingPath } from "./api.js";
import { live } from "./live.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";

const MOST_LINES = 2000;

export function Log({ training, rank = null, tail = 200, label }) {
  const { namespace, name, uid } = training;
  const box = useRef();
  const stuck = useRef(true); // to the end, until the reader scrolls away from it
  const [lines, setLines] = useState([]);
  const [state, setState] = useState("loading");
  useEffect(() => {
    const gone = new AbortController();
    const query = new URLSearchParams({ follow: "true", tail, ...(rank === null ? {} : { rank }) });
    if (!live.connected) return undefined; // what was read stays
    setState("loading");
    setLines([]);
    stuck.current = true;
    read(trainingPath({ namespace, name }, `/logs?${query}`), uid, gone.signal, setLines, setState);
    return () => gone.abort();
  }, [uid, rank, live.epoch, live.connected]);
  useLayoutEffect(() => {
    if (stuck.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines]);
  const scrolled = ({ target }) => {
    stuck.current = target.scrollHeight - target.scrollTop - target.clientHeight < 30;
  };
  return html`<div class="log" ref=${box} onScroll=${scrolled} tabindex="0" role="log" aria-live="off" aria-label=${label}>
    ${lines.length === 0 ? html`<p class="quiet">${state === "ended" ? "Nothing was written." : "Waiting for output…"}</p>`
      : html`<pre>${lines.join("\n")}</pre>`}
  </div>`;
}

async function read(path, uid, signal, setLines, setState) {
  let rest = "";
  let fresh = [];
  let timer;
  const flush = () => {
    timer = undefined;
    const added = fresh;
    fresh = [];
    if (!signal.aborted) setLines((lines) => [...lines, ...added].slice(-MOST_LINES));
  };
  try {
    for await (const piece of pieces(path, { signal, headers: { "X-Muster-Uid": uid } })) {
      const found = (rest + piece).split("\n");
      rest = found.pop();
      fresh.push(...found);
      timer ??= setTimeout(flush, 50);
    }
  } catch (error) {
    if (signal.aborted) return;
    fresh.push(...(error.status ? [error.message] : []));
  }
  if (rest) fresh.push(rest);
  setState("ended");
  flush();
}
