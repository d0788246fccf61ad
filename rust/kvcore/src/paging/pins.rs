//! Pins: handles that keep a prefix whatever else needs its space.
#![forbid(unsafe_code)]

/// Handle of a pin. Never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PinId {
    pub(super) manager: u64,
    pub(super) serial: u64,
    pub(super) index: u32,
}
