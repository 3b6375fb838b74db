// What may be done about a training? Scale, cancel, delete, run it again; and its spec, to read and to copy.

import { ask, trainingPath } from "./api.js";
import { live } from "./live.js";
import { Dialog } from "./parts.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { isOver, plural } from "./words.js";
import { given, yaml } from "./yaml.js";

const mayWrite = (who, namespace) => who.role === "admin" ||
  (who.role === "editor" && (who.namespaces.includes("*") || who.namespaces.includes(namespace)));

export function Orders({ training, who }) {
  const [open, setOpen] = useState(null);
  const { metadata } = training;
  const send = (method, tail, body) => ask(trainingPath(metadata, tail), { method, body, headers: { "X-Muster-Uid": metadata.uid } });
  const close = () => setOpen(null);
  const Asked = { scale: Scale, cancel: Cancel, delete: Delete, spec: Spec, again: Again }[open];
  const may = mayWrite(who, metadata.namespace);
  return html`<div class="orders">
    <button onClick=${() => setOpen("spec")}>Spec</button>
    ${may && html`<button onClick=${() => setOpen("again")}>Run again</button>
    ${!isOver(training) && html`<button onClick=${() => setOpen("scale")}>Scale</button>
      <button onClick=${() => setOpen("cancel")} disabled=${Boolean(training.spec.cancel)}>Cancel</button>`}
    <button class="danger" onClick=${() => setOpen("delete")} disabled=${Boolean(metadata.deletionTimestamp)}>Delete</button>`}
    ${Asked && html`<${Asked} training=${training} send=${send} close=${close} />`}
  </div>`;
}

function Scale({ training, send, close }) {
  const { min, target, max } = training.spec.worldSize;
  const [wanted, setWanted] = useState(target);
  const input = useRef();
  useEffect(() => input.current.select(), []);
  return html`<${Dialog} title=${`Scale ${training.metadata.name}`} action="Scale" close=${close}
      run=${() => send("POST", "/scale", { target: Number(wanted) })}>
    <p>It trains with ${plural(training.status.worldSize.ready, "worker")} now; ${min} to ${max} are allowed. Its ranks start a new round with
      the new size.</p>
    <label class="field">Workers <input ref=${input} type="number" min=${min} max=${max} required value=${wanted}
      onInput=${(event) => setWanted(event.target.value)} /></label>
  <//>`;
}

const Cancel = ({ training, send, close }) => html`<${Dialog} title=${`Cancel ${training.metadata.name}?`} action="Cancel training"
    kind="danger" keep="Keep it running" close=${close} run=${() => send("POST", "/cancel")}>
  <p>Its ranks are stopped within ${training.spec.stopGraceSeconds} s. It cannot be started again; its logs and history stay.</p>
<//>`;

const Delete = ({ training, send, close }) => html`<${Dialog} title=${`Delete ${training.metadata.name}?`} action="Delete training"
    kind="danger" keep="Keep it" close=${close} run=${() => send("DELETE", "")}>
  <p>${isOver(training) ? "" : "Its ranks are stopped. "}The training and its logs are removed; what it used is still counted.</p>
<//>`;

// The spec ----------------------------------------------------------------------------------------

/** What could be submitted: without what happened to it, and what only the server sets. */
function documentOf({ apiVersion, kind, metadata, spec }, name = metadata.name) {
  const { cancel, suspend, ...asked } = spec;
  const { labels } = metadata;
  const annotations = Object.fromEntries(Object.entries(metadata.annotations ?? {}).filter(([key]) => !key.includes("last-applied")));
  return { apiVersion, kind, metadata: given({ name, namespace: metadata.namespace, labels, annotations }), spec: given(asked) };
}

const secretsOf = ({ env, secretEnv }) => (secretEnv ?? []).filter((name) => name in (env ?? {}));

function Spec({ training, close }) {
  const [copied, setCopied] = useState("");
  const box = useRef();
  const words = yaml(documentOf(training));
  const secrets = secretsOf(training.spec);
  const copy = async () => setCopied(await copyText(words, box.current) ? "Copied." : "The browser does not let it: copy what is selected.");
  return html`<${Dialog} title=${`Spec of ${training.metadata.name}`} close=${close} kind="wide"
      aside=${html`<span class="quiet" role="status">${copied}</span><button type="button" onClick=${copy}>Copy</button>`}>
    <p>What was asked for, as it is now; <code>muster apply -f</code> takes it.${
      secrets.length > 0 && html` Values of secret variables (${secrets.join(", ")}) are not shown.`}</p>
    <pre class="spec" ref=${box} tabindex="0" role="region" aria-label="Spec as YAML">${words}</pre>
  <//>`;
}

async function copyText(words, box) {
  try {
    await navigator.clipboard.writeText(words); // only where the page came by https, or from this machine
    return true;
  } catch {
    getSelection().selectAllChildren(box);
    return document.execCommand("copy");
  }
}

/** The next name that nobody has: demo, demo-2, demo-3. */
function nextName({ namespace, name }) {
  const taken = new Set([...live.trainings.values()].filter((one) => one.metadata.namespace === namespace).map((one) => one.metadata.name));
  const stem = name.replace(/-\d+$/, "").slice(0, 50);
  let number = 2;
  while (taken.has(`${stem}-${number}`)) number++;
  return `${stem}-${number}`;
}

function Again({ training, close }) {
  const { metadata, spec } = training;
  const [name, setName] = useState(() => nextName(metadata));
  const [values, setValues] = useState({});
  const secrets = secretsOf(spec);
  const document = documentOf(training, name);
  const submit = async () => {
    const body = { ...document, spec: { ...document.spec, ...(spec.env && { env: { ...spec.env, ...values } }) } };
    await ask(`/v1/namespaces/${encodeURIComponent(metadata.namespace)}/trainings`, { method: "POST", body });
    location.hash = `#/trainings/${encodeURIComponent(metadata.namespace)}/${encodeURIComponent(name)}`;
  };
  return html`<${Dialog} title=${`Run ${metadata.name} again?`} action="Submit" kind="wide" close=${close} run=${submit}>
    <p>A new training with the same spec is submitted; this one stays as it is.</p>
    <label class="field">Name <input value=${name} required maxlength="63" pattern="[a-z0-9]([a-z0-9\\-]*[a-z0-9])?" spellcheck=${false}
      onInput=${(event) => setName(event.target.value)} /></label>
    ${secrets.length > 0 && html`<p>Nobody is shown the values of its secret variables; they have to be given again.</p>`}
    ${secrets.map((one) => html`<label key=${one} class="field">${one} <input type="password" required autocomplete="off"
      onInput=${(event) => setValues({ ...values, [one]: event.target.value })} /></label>`)}
    <pre class="spec" tabindex="0" role="region" aria-label="What is submitted">${yaml(document)}</pre>
  <//>`;
}
