"""The CSS of the report's page."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5a6577; --rule: #d9dee6;
  --page: #ffffff; --card: #f6f8fa; --a: #0b62c4; --b: #c2410c; --good: #17703a; --bad: #b42318;
  --note: #7a5200; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #a3adbd; --rule: #363e4b; --page: #14181f; --card: #1c222b;
    --a: #6cb0ff; --b: #ff9d5c; --good: #6fd08f; --bad: #ff8f85; --note: #e8c268; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 24px; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 28px 0 8px; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; font-weight: 400; }
th { color: var(--soft); }
.facts td { overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin-top: 10px; }
.figures { font-variant-numeric: tabular-nums; }
.figures tr { border-bottom: 1px solid var(--rule); }
.figures td, .figures tr:first-child th:not(:first-child) { text-align: right; white-space: nowrap;
  padding: 4px 0 4px 22px; }
.figures th:first-child { white-space: nowrap; }
.better td { color: var(--good); } .worse td { color: var(--bad); }
.note { color: var(--note); margin: 6px 0; }
.mark { display: inline-block; min-width: 20px; padding: 0 5px; border-radius: 4px;
  color: var(--page); font-size: 13px; text-align: center; }
.mark.a { background: var(--a); } .mark.b { background: var(--b); }
.plots { display: grid; gap: 16px; margin-top: 28px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; padding: 10px 12px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; }
figcaption { font-weight: 600; margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); stroke-dasharray: 6 3; }
"""
