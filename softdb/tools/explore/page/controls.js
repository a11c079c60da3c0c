// Buttons that copy, and sheets that open over the page.

export function copies(button, text) {
  const before = button.textContent;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text()).then(() => (button.textContent = "Copied"), () => (button.textContent = "Not allowed"));
    setTimeout(() => (button.textContent = before), 1500);
  });
}

// A sheet closes by Escape, by a click elsewhere, and when the focus leaves it.
export function sheets() {
  for (const sheet of document.querySelectorAll("details")) {
    sheet.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      sheet.open = false;
      sheet.querySelector("summary").focus();
    });
    sheet.addEventListener("focusout", (event) => event.relatedTarget && !sheet.contains(event.relatedTarget) && (sheet.open = false));
    document.addEventListener("pointerdown", (event) => !sheet.contains(event.target) && (sheet.open = false));
  }
}
