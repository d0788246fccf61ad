//! A roofline (Williams, Waterman and Patterson, 2009) of what a bench has measured, as SVG: rates over intensity, under
//! the two limits that were measured beside them.

use std::fmt::Write;

/// What was measured.
pub struct Point {
    /// Its group, which has a colour.
    pub kind: &'static str,
    /// Its name, which a pointer on it shows.
    pub label: String,
    /// Multiply-adds for each byte of K and V.
    pub intensity: f64,
    /// GMAC/s.
    pub rate: f64,
}

/// The limits and what lies below them.
pub struct Roofline {
    pub title: String,
    /// GB/s.
    pub bandwidth: f64,
    /// GMAC/s, with names.
    pub peaks: Vec<(&'static str, f64)>,
    pub points: Vec<Point>,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 56.0;
const RIGHT: f64 = 200.0;
const BOTTOM: f64 = 56.0;
const INK: &str = "#1f2933";
const SOFT: &str = "#7b8794";
const COLOURS: [&str; 6] = ["#2563eb", "#c2410c", "#15803d", "#7c3aed", "#b45309", "#0f766e"];

/// A logarithmic axis.
struct Axis {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, start: f64, end: f64) -> Self {
        let (low, high) = values.fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
        Self { from: (low * 0.8).log2().floor(), to: (high * 1.1).log2().ceil(), start, end }
    }

    fn at(&self, x: f64) -> f64 {
        self.start + (x.log2() - self.from) / (self.to - self.from) * (self.end - self.start)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        (self.from as i32..=self.to as i32).map(|power| f64::from(power).exp2())
    }
}

impl Roofline {
    /// The picture.
    pub fn svg(&self) -> String {
        let top = self.peaks.iter().map(|(_, peak)| *peak).fold(0.0, f64::max);
        let ridge = top / self.bandwidth;
        let xs = self.points.iter().map(|p| p.intensity).chain([ridge]);
        let ys = self.points.iter().map(|p| p.rate).chain([top]);
        let x = Axis::new(xs, LEFT, WIDTH - RIGHT);
        let y = Axis::new(ys, HEIGHT - BOTTOM, TOP);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\">\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
        );
        let text = |svg: &mut String, x: f64, y: f64, size: u32, colour: &str, anchor: &str, words: &str| {
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" fill=\"{colour}\" text-anchor=\"{anchor}\">{words}</text>"
            );
        };
        let line = |svg: &mut String, [x1, y1, x2, y2]: [f64; 4], colour: &str, style: &str| {
            let _ = writeln!(
                svg,
                "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" {style}/>"
            );
        };
        text(&mut svg, 24.0, 30.0, 18, INK, "start", &self.title);
        for tick in x.ticks() {
            line(&mut svg, [x.at(tick), y.start, x.at(tick), y.end], "#e4e7eb", "");
            text(&mut svg, x.at(tick), y.start + 18.0, 12, SOFT, "middle", &tick.to_string());
        }
        for tick in y.ticks() {
            line(&mut svg, [x.start, y.at(tick), x.end, y.at(tick)], "#e4e7eb", "");
            text(&mut svg, x.start - 8.0, y.at(tick) + 4.0, 12, SOFT, "end", &tick.to_string());
        }
        let under = "multiply-adds for each byte of K and V";
        text(&mut svg, f64::midpoint(x.start, x.end), HEIGHT - 14.0, 13, INK, "middle", under);
        text(&mut svg, 24.0, TOP - 8.0, 13, INK, "start", "GMAC/s");
        // The slope from the left or the lower edge on, whichever it meets first.
        let first = x.from.exp2().max(y.from.exp2() / self.bandwidth);
        let slope = [x.at(first), y.at(first * self.bandwidth), x.at(ridge), y.at(top)];
        line(&mut svg, slope, INK, "stroke-width=\"2\"");
        text(&mut svg, x.end + 10.0, TOP + 4.0, 12, SOFT, "start", &format!("slope: {:.1} GB/s", self.bandwidth));
        for (name, peak) in &self.peaks {
            line(&mut svg, [x.at(peak / self.bandwidth), y.at(*peak), x.end, y.at(*peak)], INK, "stroke-width=\"2\"");
            text(&mut svg, x.end + 10.0, y.at(*peak) + 18.0, 12, SOFT, "start", &format!("{name}: {peak:.0} GMAC/s"));
        }
        let mut kinds: Vec<&str> = self.points.iter().map(|p| p.kind).collect();
        kinds.dedup();
        kinds.sort_unstable();
        kinds.dedup();
        for point in &self.points {
            let colour = COLOURS[kinds.iter().position(|kind| *kind == point.kind).unwrap_or(0) % COLOURS.len()];
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{colour}\" fill-opacity=\"0.75\"><title>{}: {:.1} GMAC/s</title></circle>",
                x.at(point.intensity),
                y.at(point.rate),
                point.label,
                point.rate
            );
        }
        for (i, kind) in kinds.iter().enumerate() {
            let at = y.start - 22.0 * (kinds.len() - i) as f64;
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{}\"/>",
                x.end + 16.0,
                at - 4.0,
                COLOURS[i % COLOURS.len()]
            );
            text(&mut svg, x.end + 28.0, at, 12, INK, "start", kind);
        }
        svg + "</svg>\n"
    }
}
