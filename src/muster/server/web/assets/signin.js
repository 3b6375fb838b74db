// How does the page get its token from `muster dashboard`? The address has a code, which is good once and is taken out
// of it before anything else happens; the code is then given for the token.

import { Refusal } from "./api.js";

const CODE = /^#\/sign-in\/([-\w]{1,128})$/;

/** The code of the address, if it has one; from then on it has none, and neither has the history. */
export function takeCode() {
  const found = CODE.exec(location.hash);
  if (found) history.replaceState(null, "", "#/trainings");
  return found?.[1] ?? "";
}

/** Exchange a code for the token behind it, with the token's name, role and namespaces. */
export async function redeemed(code) {
  let answer;
  try {
    const headers = { "Content-Type": "application/json" };
    answer = await fetch("/sign-in", { method: "POST", headers, body: JSON.stringify({ code }), cache: "no-store" });
  } catch {
    throw new Refusal(0);
  }
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refusal(answer.status, told.error);
  return told;
}
