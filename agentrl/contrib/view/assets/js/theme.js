// Before anything is drawn: the theme that was chosen, so that a dark page does not flash white.
try {
  const theme = localStorage.getItem("agentrl.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is refused: the system's theme.
}
