//! Numbers as they stand in a file: little-endian on every machine.
#![forbid(unsafe_code)]

use super::Dtype;

/// A number that tensors are made of.
pub trait Value: Copy {
    /// Its name in the file.
    const DTYPE: Dtype;
    /// Its bytes.
    type Bytes: AsRef<[u8]>;
    /// To the file.
    fn to_bytes(self) -> Self::Bytes;
    /// From the file; `bytes` has the length of [`Self::Bytes`].
    fn from_bytes(bytes: &[u8]) -> Self;
}

macro_rules! values {
    ($($number:ident $dtype:ident),*) => {$(
        impl Value for $number {
            const DTYPE: Dtype = Dtype::$dtype;
            type Bytes = [u8; size_of::<$number>()];

            fn to_bytes(self) -> Self::Bytes {
                self.to_le_bytes()
            }

            fn from_bytes(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<$number>()];
                own.copy_from_slice(bytes);
                Self::from_le_bytes(own)
            }
        }
    )*};
}

values!(u8 U8, u16 U16, u32 U32, u64 U64, i32 I32, i64 I64, f32 F32, f64 F64);
