/* The page of `ckpt report`: head, styles, escaping. */
#include "report.h"

#include <math.h>
#include <string.h>

void ckpt_html(ckpt_buf *out, const char *s)
{
    for (; *s != '\0'; s++) {
        unsigned char c = (unsigned char)*s;
        if (!ckpt_tool_markup(out, c))
            ckpt_buf_putc(out, (c < 0x20 && c != '\n') || c == 0x7f ? '?' : c);
    }
}

void ckpt_short_number(double v, char out[32])
{
    if (!isfinite(v))
        snprintf(out, 32, "%s", isnan(v) ? "nan" : v > 0 ? "inf" : "-inf");
    else if (v != 0 && (fabs(v) >= 1e5 || fabs(v) < 1e-3))
        snprintf(out, 32, "%.2e", v);
    else
        snprintf(out, 32, "%.4g", v);
}

/* s0..s5: lines and ranks; h0..h8: a heat map from nothing to much, readable in both schemes. */
static const char style[] =
    ":root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#57606a;--line:#d0d7de;"
    "--card:#f6f8fa;--bad:#b42318;--good:#1a7f37;--s0:#0b62c4;--s1:#c2410c;--s2:#15803d;--s3:#"
    "7c3aed;"
    "--s4:#b45309;--s5:#be185d;--h0:#eef4fb;--h1:#d6e6f7;--h2:#b3d1ef;--h3:#86b6e2;--h4:#5c98d1;"
    "--h5:#3f7cbb;--h6:#2a609d;--h7:#1b467c;--h8:#0f2f5a}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--dim:#9da7b3;--line:#"
    "30363d;"
    "--card:#161b22;--bad:#ff8579;--good:#56d364;--s0:#6cb6ff;--s1:#ffa657;--s2:#56d364;--s3:#"
    "c49bff;"
    "--s4:#e3b341;--s5:#ff9bce;--h0:#161d28;--h1:#1a2b42;--h2:#1d3b60;--h3:#21507f;--h4:#2a68a3;"
    "--h5:#3b84c6;--h6:#61a5e0;--h7:#95c6ef;--h8:#d0e6fb}}\n"
    "*{box-sizing:border-box}body{margin:0 auto;padding:1rem;max-width:76rem;background:var(--bg);"
    "color:var(--fg);font:16px/1.5 system-ui,sans-serif}h1{font-size:1.5rem;margin:.5rem 0}"
    "h2{font-size:1.2rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--line)}"
    "h3{font-size:1rem;margin:0 0 .3rem}p{margin:.4rem 0}"
    ".grid{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr))"
    "}"
    "figure{margin:0;padding:.75rem;background:var(--card);border:1px solid var(--line);"
    "border-radius:.5rem;min-width:0}figure>svg{display:block;width:100%;height:auto}"
    ".scroll{overflow-x:auto;max-width:100%}.scroll:focus-visible,summary:focus-visible{outline:"
    "3px "
    "solid var(--s0);outline-offset:2px}table{border-collapse:collapse;font-size:.85rem}"
    "th,td{padding:.2rem .6rem;border-bottom:1px solid var(--line);text-align:left}"
    "td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}summary{cursor:pointer;"
    "color:var(--dim);padding:.3rem 0}svg text{fill:var(--fg);font:11px system-ui,sans-serif}"
    "svg .dim{fill:var(--dim)}svg .axis{stroke:var(--line);stroke-width:1}"
    "svg .l{fill:none;stroke-width:1.5;stroke-linejoin:round}.key{display:flex;flex-wrap:wrap;"
    "gap:.2rem 1rem;font-size:.85rem;list-style:none;margin:.3rem 0 0;padding:0}"
    ".key "
    "b{display:inline-block;width:1.2rem;height:.25rem;margin-right:.4rem;vertical-align:middle}"
    ".bad{color:var(--bad)}.good{color:var(--good)}.dim{color:var(--dim)}"
    "svg .u{stroke-width:4;opacity:.55}.scroll "
    "table{min-width:max-content}code{font-size:.85rem}h3 code,li code{overflow-wrap:anywhere}svg "
    ".mark{stroke:var(--bad);stroke-width:1.5}\n";

void ckpt_page_begin(ckpt_buf *out, const char *title)
{
    ckpt_buf_puts(out, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
                       "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
                       "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
                       "style-src 'unsafe-inline'; img-src data:\">\n"
                       "<link rel=\"icon\" href=\"data:,\">\n<title>");
    ckpt_html(out, title);
    ckpt_buf_puts(out, "</title>\n<style>\n");
    ckpt_buf_puts(out, style);
    for (int i = 0; i < 6; i++)
        ckpt_buf_printf(out,
                        "svg .s%d{stroke:var(--s%d)}svg .f%d{fill:var(--s%d)}.b%d{background:"
                        "var(--s%d)}\n",
                        i, i, i, i, i, i);
    for (int i = 0; i < 9; i++)
        ckpt_buf_printf(out, "svg .h%d{fill:var(--h%d)}", i, i);
    ckpt_buf_puts(out, "\n</style>\n</head>\n<body>\n<main>\n<h1>");
    ckpt_html(out, title);
    ckpt_buf_puts(out, "</h1>\n");
}

void ckpt_page_end(ckpt_buf *out)
{
    ckpt_buf_puts(out, "</main>\n<footer class=\"dim\"><p>ckpt " CKPT_VERSION
                       "</p></footer>\n</body>\n</html>\n");
}
