# The rows of plan.sh as a picture: CPU seconds against tensors, both logarithmic, and n log n through
# the first series' point at 100,000 tensors, or its last.
function x(n) { return 80 + 540 * (log(n) / log(10) - 3) / 3 }
function y(s) { s = s < low ? low : s; return 380 - 340 * (log(s) - log(low)) / (log(high) - log(low)) }
function text(px, py, anchor, s, more) {
    printf "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>%s</text>\n", px, py, anchor, more, s
}
function line(x1, y1, x2, y2, style) {
    printf "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2, y2, style
}
function series(k, colour, name, py,    i, path, joined) {
    for (i = 1; i <= rows; i++)
        if (v[k, i] > 0) {
            path = path (joined++ ? " L" : "M") sprintf("%.1f %.1f", x(n[i]), y(v[k, i]))
            printf "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\"><title>%d tensors: %s s</title></circle>\n", \
                x(n[i]), y(v[k, i]), colour, n[i], v[k, i]
        }
    printf "<path d=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\"/>\n", path, colour
    printf "<circle cx=\"98\" cy=\"%d\" r=\"4\" fill=\"%s\"/>\n", py - 4, colour
    text(110, py, "start", name, "")
}
$2 ~ /^[0-9]+$/ {
    n[++rows] = $2
    v[1, rows] = $3
    v[2, rows] = $6 ~ /^[0-9.]+$/ ? $6 : 0
    v[3, rows] = $8
}
END {
    low = 0.001
    high = 100
    print "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 660 440\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#222\">"
    print "<title>CPU seconds of a plan against the number of tensors</title>"
    print "<rect width=\"660\" height=\"440\" fill=\"#fff\"/>"
    for (e = 3; e <= 6; e++) {
        line(x(10 ^ e), 40, x(10 ^ e), 380, "stroke=\"#ddd\"")
        text(x(10 ^ e), 400, "middle", "10<tspan dy=\"-5\" font-size=\"10\">" e "</tspan>", "")
    }
    for (e = -3; e <= 2; e++) {
        line(80, y(10 ^ e), 620, y(10 ^ e), "stroke=\"#ddd\"")
        text(72, y(10 ^ e) + 4, "end", 10 ^ e, "")
    }
    text(350, 428, "middle", "tensors", "")
    text(24, 210, "middle", "CPU seconds (user and system)", " transform=\"rotate(-90 24 210)\"")
    base = rows
    for (i = 1; i <= rows; i++)
        if (n[i] == 100000)
            base = i
    for (i = 1; i <= rows; i++)
        path = path (i > 1 ? " L" : "M") sprintf("%.1f %.1f", x(n[i]), y(v[1, base] * n[i] * log(n[i]) / (n[base] * log(n[base]))))
    printf "<path d=\"%s\" fill=\"none\" stroke=\"#888\" stroke-width=\"1.5\" stroke-dasharray=\"6 4\"/>\n", path
    line(90, 56, 106, 56, "stroke=\"#888\" stroke-width=\"1.5\" stroke-dasharray=\"6 4\"")
    text(110, 60, "start", "n log n", "")
    series(1, "#1f6fb4", "plan of one file", 80)
    series(2, "#c4521a", "plan of as many files as tensors", 100)
    series(3, "#3a8a3f", "inspect of the .metadata of as many", 120)
    print "</svg>"
}
