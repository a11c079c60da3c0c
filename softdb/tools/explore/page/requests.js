// Requests to the server: of each kind, a newer one cancels the one before, here and there.

const VISIBLE = 150; // milliseconds until waiting is shown

let pending = 0, patience = 0;
function busy(by) {
  pending += by;
  document.getElementById("answer").setAttribute("aria-busy", String(pending > 0));
  clearTimeout(patience);
  if (!pending) document.body.classList.remove("waiting");
  else patience = setTimeout(() => document.body.classList.add("waiting"), VISIBLE);
}

// An error of a call without its verb: "get: id 5 …" is "Id 5 …."
const sentence = (message) => message.replace(/^[a-z_]+: /, "").replace(/^./, (first) => first.toUpperCase()).replace(/[^.!?]$/, "$&.");

export class Problem extends Error {}

export class Channel {
  constructor(quiet = false) {
    this.quiet = quiet; // a quiet one does not mark the answer as waiting
  }

  async get(call, parameters) {
    this.controller?.abort();
    const mine = (this.controller = new AbortController());
    this.since = performance.now();
    if (!this.quiet) busy(1);
    try {
      const response = await fetch(`api/${call}?${new URLSearchParams(parameters)}`, { signal: mine.signal });
      if (response.status === 403) throw new Problem("This address is no longer valid. Open the one that softdb explore printed last.");
      if (response.status >= 400 && !response.headers.get("content-type")?.includes("json")) throw new Problem("The question is longer than this server takes.");
      const answer = await response.json();
      if (answer.error) throw new Problem(sentence(answer.error.message));
      return answer;
    } catch (error) {
      if (error.name === "AbortError" || mine !== this.controller) return null;
      throw error instanceof Problem ? error : new Problem("The server does not answer. Has it ended? Start softdb explore again.");
    } finally {
      if (mine === this.controller) this.controller = null;
      if (!this.quiet) busy(-1);
    }
  }

  get busy() {
    return this.controller ? performance.now() - this.since : -1;
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
  }
}
