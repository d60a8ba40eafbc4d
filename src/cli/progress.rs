//! Where the walk is, on standard error.
//!
//! On a terminal every stage in hand is a bar: layer and stage, done of total, rate, time left, and the expert or prompt
//! last done. Elsewhere (a file, a pipe) it is plain lines: one when a stage begins, at most one every ten seconds while
//! it lasts, one when it ends. Notes are lines of their own in either case, and are kept for the report. Nothing here
//! ever goes to standard output, and a standard error that cannot be written to is not a reason to stop.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{
    HumanDuration, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle,
};

use crate::walk::progress::Observer;

/// Least time between two plain lines of a stage.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Columns kept for layer and stage.
const TEMPLATE: &str = "{prefix:22!} {bar:10} {pos:>4}/{len} {rate:>7} {left:>4} left {wide_msg}";

/// Progress on standard error. May be called from any thread; stages may be nested, and `advance` and `end` are about
/// the innermost.
pub struct Bars {
    show: Show,
    line_every: Duration,
    state: Mutex<State>,
}

enum Show {
    /// Bars on a terminal.
    Bars(MultiProgress),
    /// Plain lines.
    Lines,
    /// Notes only.
    Notes,
}

struct State {
    stages: Vec<Stage>,
    notes: Vec<String>,
    out: Box<dyn Write + Send>,
}

struct Stage {
    title: String,
    total: u64,
    done: u64,
    begun: Instant,
    told: Instant,
    bar: Option<ProgressBar>,
}

impl Bars {
    /// Progress on standard error; `quiet` shows notes only.
    pub fn new(quiet: bool) -> Self {
        let stderr = std::io::stderr();
        let show = if quiet {
            Show::Notes
        } else if stderr.is_terminal() {
            Show::Bars(MultiProgress::with_draw_target(ProgressDrawTarget::stderr()))
        } else {
            Show::Lines
        };
        Self::with(show, Box::new(stderr), LINE_EVERY)
    }

    fn with(show: Show, out: Box<dyn Write + Send>, line_every: Duration) -> Self {
        Self { show, line_every, state: Mutex::new(State { stages: Vec::new(), notes: Vec::new(), out }) }
    }

    /// The notes so far, in the order they came.
    pub fn notes(&self) -> Vec<String> {
        self.state().notes.clone()
    }

    /// Runs `print` with the bars out of the way, so that what it writes to the terminal is not torn by them.
    /// It must not call this object again.
    pub fn suspend<R>(&self, print: impl FnOnce() -> R) -> R {
        match &self.show {
            Show::Bars(bars) => bars.suspend(print),
            Show::Lines | Show::Notes => print(),
        }
    }

    /// A thread that panicked between two lines has left nothing half done that matters here.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn style() -> ProgressStyle {
    let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
    // Before the first unit is done nothing is known of the time left, which is not the same as none being left.
    let left = |state: &ProgressState, out: &mut dyn fmt::Write| {
        let _ = match state.pos() {
            0 => out.write_char('?'),
            _ => write!(out, "{:#}", HumanDuration(state.eta())),
        };
    };
    let rate = |state: &ProgressState, out: &mut dyn fmt::Write| {
        let _ = write!(out, "{:.1}/s", state.per_sec());
    };
    style.with_key("rate", rate).with_key("left", left).progress_chars("=> ")
}

impl Observer for Bars {
    fn begin(&self, stage: &str, layer: Option<usize>, total: u64) {
        let title = match layer {
            Some(layer) => format!("layer {layer}: {stage}"),
            None => stage.to_owned(),
        };
        let bar = match &self.show {
            Show::Bars(bars) => {
                let bar = ProgressBar::new(total).with_style(style()).with_prefix(title.clone());
                let bar = bars.add(bar);
                // Time and rate move on while a long unit is at work.
                bar.enable_steady_tick(Duration::from_millis(250));
                Some(bar)
            }
            Show::Lines | Show::Notes => None,
        };
        let mut state = self.state();
        if matches!(self.show, Show::Lines) {
            state.line(&format!("{title}: {total} to do"));
        }
        let now = Instant::now();
        state.stages.push(Stage { title, total, done: 0, begun: now, told: now, bar });
    }

    fn advance(&self, item: &str) {
        let mut state = self.state();
        let Some(stage) = state.stages.last_mut() else { return };
        stage.done += 1;
        if let Some(bar) = &stage.bar {
            // The message last: only it redraws at once.
            bar.set_position(stage.done);
            bar.set_message(item.to_owned());
        } else if matches!(self.show, Show::Lines) && stage.told.elapsed() >= self.line_every {
            stage.told = Instant::now();
            let line = stage.line(item, stage.begun.elapsed());
            state.line(&line);
        }
    }

    fn end(&self) {
        let mut state = self.state();
        let Some(stage) = state.stages.pop() else { return };
        if let Some(bar) = stage.bar {
            bar.finish_and_clear();
        } else if matches!(self.show, Show::Lines) {
            let seconds = stage.begun.elapsed().as_secs_f64();
            state.line(&format!("{}: {} done in {seconds:.1} s", stage.title, stage.done));
        }
    }

    fn stop_requested(&self) -> bool {
        super::interrupt::requested()
    }

    fn note(&self, text: &str) {
        let mut state = self.state();
        state.notes.push(text.to_owned());
        self.suspend(|| state.line(&format!("note: {text}")));
    }
}

impl Drop for Bars {
    /// An error leaves stages open: their bars must not stay on the terminal under its message.
    fn drop(&mut self) {
        for stage in self.state().stages.drain(..) {
            if let Some(bar) = stage.bar {
                bar.finish_and_clear();
            }
        }
    }
}

impl State {
    fn line(&mut self, text: &str) {
        let _ = self.out.write_all(format!("{text}\n").as_bytes()).and_then(|()| self.out.flush());
    }
}

impl Stage {
    /// Where the stage is after so much time.
    fn line(&self, item: &str, elapsed: Duration) -> String {
        let Self { title, total, done, .. } = self;
        let rate = *done as f64 / elapsed.as_secs_f64();
        let left = total.saturating_sub(*done) as f64 / rate;
        format!("{title}: {done}/{total}, {rate:.1}/s, {left:.0} s left ({item})")
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use indicatif::TermLike;

    use super::*;

    /// What was written, and how a terminal of 120 columns was asked to show it.
    #[derive(Debug, Clone, Default)]
    struct Screen(Arc<Mutex<Vec<u8>>>);

    impl Screen {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            120
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, text: &str) -> io::Result<()> {
            self.clone().write_all(format!("{text}\n").as_bytes())
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.clone().write_all(text.as_bytes())
        }

        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines(every: Duration) -> (Bars, Screen) {
        let screen = Screen::default();
        (Bars::with(Show::Lines, Box::new(screen.clone()), every), screen)
    }

    #[test]
    fn without_a_terminal_a_stage_is_a_line_at_begin_and_end() {
        let (bars, screen) = lines(LINE_EVERY);
        bars.begin("probes", Some(3), 2);
        bars.advance("expert 0");
        bars.note("expert 7 has 12 rows");
        bars.advance("expert 1");
        bars.end();
        assert_eq!(bars.notes(), ["expert 7 has 12 rows"]);
        assert_eq!(
            screen.text(),
            "layer 3: probes: 2 to do\nnote: expert 7 has 12 rows\nlayer 3: probes: 2 done in 0.0 s\n"
        );
    }

    #[test]
    fn a_line_in_between_says_rate_time_left_and_item() {
        let (bars, screen) = lines(Duration::ZERO);
        bars.begin("compare", None, 40);
        bars.advance("prose.evaluate.000");
        let text = screen.text();
        let line = text.lines().last().unwrap();
        assert!(line.starts_with("compare: 1/40, ") && line.ends_with("left (prose.evaluate.000)"), "{line}");
        let now = Instant::now();
        let stage =
            Stage { title: "layer 2: probes".into(), total: 24, done: 6, begun: now, told: now, bar: None };
        assert_eq!(
            stage.line("expert 5", Duration::from_secs(3)),
            "layer 2: probes: 6/24, 2.0/s, 9 s left (expert 5)"
        );
    }

    #[test]
    fn quiet_shows_notes_only() {
        let screen = Screen::default();
        let bars = Bars::with(Show::Notes, Box::new(screen.clone()), Duration::ZERO);
        bars.begin("probes", Some(3), 1);
        bars.advance("expert 0");
        bars.note("scalar search");
        bars.end();
        assert_eq!(screen.text(), "note: scalar search\n");
        assert_eq!(bars.notes(), ["scalar search"]);
    }

    #[test]
    fn on_a_terminal_a_bar_shows_layer_stage_item_and_place() {
        let screen = Screen::default();
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        let show = Show::Bars(MultiProgress::with_draw_target(target));
        let bars = Bars::with(show, Box::new(screen.clone()), LINE_EVERY);
        bars.begin("final encode", Some(4), 8);
        bars.advance("expert 0");
        // A note redraws the bar below it.
        bars.note("a slow path");
        let text = screen.text();
        for part in ["layer 4: final encode", "1/8", "/s", "left", "expert 0", "note: a slow path\n"] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
        bars.end();
    }

    #[test]
    fn threads_share_a_stage_and_stages_nest() {
        let (bars, screen) = lines(LINE_EVERY);
        bars.begin("walk", None, 1);
        bars.begin("probes", Some(2), 400);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let bars = &bars;
                scope.spawn(move || (0..100).for_each(|item| bars.advance(&format!("{thread}.{item}"))));
            }
        });
        bars.end();
        bars.advance("layer 2");
        bars.end();
        bars.end();
        bars.advance("nothing in hand");
        let text = screen.text();
        assert!(text.contains("layer 2: probes: 400 done in "), "{text}");
        assert!(text.contains("walk: 1 done in "), "{text}");
        assert_eq!(text.lines().count(), 4);
    }
}
