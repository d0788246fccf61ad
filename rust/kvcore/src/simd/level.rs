//! The run-time choice of a SIMD level.
#![forbid(unsafe_code)]

#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512, avx512_bf16::Avx512Bf16};
use super::{scalar::Scalar, vector::Simd, vector::Work};
use crate::{Error, Result};

/// The environment variable that forces a level.
pub const ENV: &str = "KVCORE_SIMD";

/// A level that this CPU has. Only [`Level::select`], [`Level::best`] and [`Level::available`] make one.
#[derive(Clone, Copy, Debug)]
pub struct Level(Kind);

#[derive(Clone, Copy, Debug)]
enum Kind {
    Scalar(Scalar),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512Bf16),
    #[cfg(target_arch = "x86_64")]
    Amx(Avx512Bf16),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
}

/// Names that [`Level::select`] takes, on any machine: those of all levels, and `avx512` for the faster form of
/// AVX-512 on this CPU, with bf16 instructions (`avx512bf16`) or without (`avx512f`).
const NAMES: [&str; 8] = ["auto", "scalar", "avx2", "avx512", "avx512f", "avx512bf16", "amx", "neon"];

impl Level {
    /// All levels of this CPU, the portable one first and the fastest last.
    pub fn available() -> Vec<Level> {
        let levels = Self::without_tiles();
        #[cfg(target_arch = "x86_64")]
        let levels = levels.into_iter().chain(Avx512Bf16::with_amx().map(|s| Level(Kind::Amx(s)))).collect();
        levels
    }

    /// Those for which the system need not be asked: to let a process use tile registers changes what it asks of all stacks for
    /// signals.
    fn without_tiles() -> Vec<Level> {
        let mut levels = vec![Kind::Scalar(Scalar)];
        #[cfg(target_arch = "x86_64")]
        {
            levels.extend(Avx2::new().map(Kind::Avx2));
            let (f32, bf16) = (Avx512::new().map(Kind::Avx512), Avx512Bf16::new());
            let slow = bf16.is_some_and(Avx512Bf16::is_slow);
            let bf16 = bf16.map(Kind::Avx512Bf16);
            levels.extend(if slow { [bf16, f32] } else { [f32, bf16] }.into_iter().flatten());
        }
        #[cfg(target_arch = "aarch64")]
        levels.extend(Neon::new().map(Kind::Neon));
        levels.into_iter().map(Level).collect()
    }

    /// The fastest level of this CPU.
    pub fn best() -> Level {
        *Self::available().last().expect("the portable level is always there")
    }

    /// The level with this name: `auto` | `scalar` | `avx2` | `avx512` | `avx512f` | `avx512bf16` | `amx` |
    /// `neon`.
    ///
    /// # Errors
    /// [`Error::UnsupportedSimd`] for an unknown name, or a level that this CPU lacks.
    pub fn select(name: &str) -> Result<Level> {
        let available = if ["auto", "amx"].contains(&name) { Self::available() } else { Self::without_tiles() };
        if !NAMES.contains(&name) {
            return Err(Error::UnsupportedSimd(format!("{ENV}={name:?}: expected one of {}", NAMES.join(", "))));
        }
        let wanted = |level: &&Level| match name {
            "auto" => true,
            "avx512" => level.name().starts_with("avx512"),
            other => level.name() == other,
        };
        available.iter().rev().find(wanted).copied().ok_or_else(|| {
            let has = Self::available().iter().map(Level::name).collect::<Vec<_>>().join(", ");
            let who = if name == "amx" {
                "this CPU does not have it, or the system does not grant it to this process"
            } else {
                "this CPU does not have it"
            };
            Error::UnsupportedSimd(format!("{ENV}={name}: {who}; it has {has}"))
        })
    }

    /// The level that the environment variable `KVCORE_SIMD` asks for, or the best.
    ///
    /// # Errors
    /// As [`Level::select`].
    pub fn from_env() -> Result<Level> {
        match std::env::var(ENV) {
            Ok(name) if name.is_empty() => Ok(Self::best()),
            Ok(name) => Self::select(&name),
            Err(std::env::VarError::NotPresent) => Ok(Self::best()),
            Err(std::env::VarError::NotUnicode(_)) => Self::select("(not unicode)"),
        }
    }

    /// `scalar`, `avx2`, `avx512f`, `avx512bf16`, `amx` or `neon`.
    pub fn name(&self) -> &'static str {
        struct Name;
        impl<S: Simd> Work<S> for Name {
            type Output = &'static str;
            fn run(self, s: S) -> &'static str {
                if s.tiles().is_some() { "amx" } else { S::NAME }
            }
        }
        self.dispatch(Name)
    }

    /// Whether products of bf16 go through tile registers.
    pub fn has_tiles(&self) -> bool {
        struct HasTiles;
        impl<S: Simd> Work<S> for HasTiles {
            type Output = bool;
            fn run(self, s: S) -> bool {
                s.tiles().is_some()
            }
        }
        self.dispatch(HasTiles)
    }

    /// Run `work` on this level.
    #[inline]
    pub fn dispatch<O, W: AnyLevel<O>>(&self, work: W) -> O {
        match self.0 {
            Kind::Scalar(s) => s.run(work),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(s) => s.run(work),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(s) => s.run(work),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(s) | Kind::Amx(s) => s.run(work),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(s) => s.run(work),
        }
    }
}

/// Work on every level that the architecture may have: what is generic over `S: Simd` is that.
pub trait AnyLevel<O>: Work<Scalar, Output = O> + OwnLevels<O> {}
impl<O, W: Work<Scalar, Output = O> + OwnLevels<O>> AnyLevel<O> for W {}

/// The levels of this architecture alone.
#[cfg(target_arch = "x86_64")]
pub trait OwnLevels<O>: Work<Avx2, Output = O> + Work<Avx512, Output = O> + Work<Avx512Bf16, Output = O> {}
#[cfg(target_arch = "x86_64")]
impl<O, W> OwnLevels<O> for W where W: Work<Avx2, Output = O> + Work<Avx512, Output = O> + Work<Avx512Bf16, Output = O> {}

/// The levels of this architecture alone.
#[cfg(target_arch = "aarch64")]
pub trait OwnLevels<O>: Work<Neon, Output = O> {}
#[cfg(target_arch = "aarch64")]
impl<O, W: Work<Neon, Output = O>> OwnLevels<O> for W {}

/// The levels of this architecture alone: none but the portable one.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub trait OwnLevels<O> {}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
impl<O, W> OwnLevels<O> for W {}
