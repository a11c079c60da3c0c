// What the browser keeps from visit to visit: the theme, and that the sweep has been seen.

export const kept = (name, value) => {
  try {
    if (value !== undefined) localStorage.setItem(`softdb-${name}`, value);
    return localStorage.getItem(`softdb-${name}`);
  } catch {
    return null; // a browser that keeps nothing
  }
};

// Follow the button, the system and other tabs; `paint` draws in "dark" or "light".
export function themed(button, paint) {
  const dark = matchMedia("(prefers-color-scheme: dark)"), themes = ["system", "light", "dark"];
  const show = () => {
    const theme = kept("theme") ?? "system";
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `◐ ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
    paint(theme === "system" ? (dark.matches ? "dark" : "light") : theme);
  };
  button.addEventListener("click", () => {
    kept("theme", themes[(themes.indexOf(kept("theme") ?? "system") + 1) % 3]);
    show();
  });
  dark.addEventListener("change", show);
  window.addEventListener("storage", show);
  show();
}
