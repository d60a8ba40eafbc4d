//! `walk encode`: weights of one safetensors file packed, outside of a walk.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::common::{RunArgs, note_slow_search};
use crate::codec::kaiju::{CodeWidth, Settings};
use crate::error::{Result, refuse};
use crate::tensors::{EncodeOptions, ImportanceFile, LinearCodec, encode};

/// Arguments of `walk encode`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
WHAT IT DOES
  Packs 2-D weights of one safetensors file of any model and copies everything else byte for byte. Without --tensor it takes
  every BF16, F16 or F32 matrix that ends in .weight and whose sizes the codec takes; 2-D tensors that stay plain are listed.
  kaiju1   Leech-lattice blocks of 24 weights, the most important inputs in int8; any sizes; about 3 bits a weight.
           {module}.weight becomes {module}.kaiju1 (docs/formats/kaiju1.md).
  trellis  EXL3, codebook mcg, at --bits; sizes have to be multiples of 128. Becomes {module}.{trellis,suh,svh,mcg}.
           2 to 6 bits are fast where there is AVX512-FP16; 1, 7 and 8 bits take some 60 times as long.
IMPORTANCE
  What the errors of a weight's inputs weigh:
  --imatrix FILE  a llama.cpp importance matrix in GGUF (an old .dat: `llama-imatrix --in-file OLD -o NEW.gguf` makes one of it).
                  Entries are looked up by the tensor's own name, then by what llama.cpp calls it (blk.7.ffn_down.weight).
  --hessian FILE  safetensors: by the tensor's name, F32 or F64 [K], the mean of x^2 of its inputs, or [K, K], the mean of xxT.
                  With a full one kaiju1 feeds errors forward (--no-feedback: does not) and trellis runs LDLQ on all of it.
  neither         all inputs weigh the same.
  A tensor of which the file has nothing (an expert that no row went to, too) is refused, unless --flat-missing says that it may
  be encoded as flat; those are counted.
MEMORY
  One weight at a time; trellis and a full Hessian need some K x K matrices besides.
OUTPUT
  A table on stdout: bits a weight from the stored bytes, and the weighted error sum h (w - q)^2 / sum h w^2 of what they
  decode to, h being the importance; with a full Hessian tr(EHE)/tr(WHW) as well. With --json one line {\"type\":\"encode\",\"data\"}.
  OUT appears whole or not at all, and its bytes do not depend on threads. Its metadata is that of IN and, in walk_encode, what
  was done.
EXAMPLES
  walk encode --codec kaiju1 models/tiny/model-00001-of-00003.safetensors packed.safetensors
  walk encode --codec kaiju1 --preset v1 --imatrix imatrix.gguf model.safetensors packed.safetensors
  walk encode --codec trellis --bits 3 --hessian h.safetensors --tensor model.layers.0.mlp.up_proj.weight in.safetensors out.safetensors
  walk decode packed.safetensors plain.safetensors
EXIT CODES
  0 done    1 a check failed    2 bad usage or input    3 interrupted: nothing was written")]
pub struct EncodeArgs {
    /// What is read: a safetensors file.
    #[arg(value_name = "IN.SAFETENSORS")]
    input: PathBuf,

    /// What is made: a safetensors file. It must not be there yet.
    #[arg(value_name = "OUT.SAFETENSORS")]
    out: PathBuf,

    /// The codec.
    #[arg(long, value_name = "CODEC", value_enum)]
    codec: CodecArg,

    /// A weight to be packed, by its full name; may be given again [default: all that the codec takes].
    #[arg(long, value_name = "NAME")]
    tensor: Vec<String>,

    /// trellis: bits a weight, 1 to 8.
    #[arg(long, value_name = "B")]
    bits: Option<u32>,

    /// kaiju1: v1 (56-bit codes, a tenth of the inputs in int8) or v2 (64-bit codes, a fortieth) [default: v2].
    #[arg(long, value_name = "PRESET", value_enum)]
    preset: Option<Preset>,

    /// kaiju1: width of a block's code, 56 or 64, instead of the preset's.
    #[arg(long, value_name = "BITS")]
    code_bits: Option<u32>,

    /// kaiju1: share of the inputs that goes to the int8 side-band, 0 to 1, instead of the preset's.
    #[arg(long, value_name = "X")]
    hi_frac: Option<f64>,

    /// kaiju1: feed errors forward through a full Hessian, whatever the preset says.
    #[arg(long, overrides_with = "no_feedback")]
    feedback: bool,

    /// kaiju1: use a full Hessian's diagonal alone.
    #[arg(long)]
    no_feedback: bool,

    /// Importance matrix of llama.cpp, GGUF.
    #[arg(long, value_name = "FILE", conflicts_with = "hessian")]
    imatrix: Option<PathBuf>,

    /// Hessians by the weights' names, safetensors.
    #[arg(long, value_name = "FILE")]
    hessian: Option<PathBuf>,

    /// Encode tensors that --imatrix or --hessian has nothing of as flat, and count them.
    #[arg(long)]
    flat_missing: bool,

    #[command(flatten)]
    run: RunArgs,
}

/// Codecs on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CodecArg {
    /// Leech-lattice blocks and an int8 side-band.
    Kaiju1,
    /// EXL3.
    Trellis,
}

/// Presets of KAIJU1 on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Preset {
    /// The document's.
    V1,
    /// Better almost everywhere.
    V2,
}

impl EncodeArgs {
    fn linear_codec(&self) -> Result<LinearCodec> {
        let belongs = |option: &str, codec: &str| {
            refuse("the option is of the other codec").field(option).wanted(format!("--codec {codec}"))
        };
        if self.codec == CodecArg::Trellis {
            let of_kaiju = [
                ("--preset", self.preset.is_some()),
                ("--code-bits", self.code_bits.is_some()),
                ("--hi-frac", self.hi_frac.is_some()),
                ("--feedback", self.feedback),
                ("--no-feedback", self.no_feedback),
            ];
            if let Some((option, _)) = of_kaiju.into_iter().find(|(_, given)| *given) {
                return belongs(option, "kaiju1").err();
            }
            return match self.bits {
                Some(bits) if (1..=8).contains(&bits) => Ok(LinearCodec::Trellis(bits)),
                Some(bits) => refuse(format!("{bits} bits a weight")).field("--bits").wanted("1 to 8").err(),
                None => refuse("the trellis needs a width").field("--bits").wanted("1 to 8").err(),
            };
        }
        if self.bits.is_some() {
            return belongs("--bits", "trellis").err();
        }
        let mut settings = match self.preset.unwrap_or(Preset::V2) {
            Preset::V1 => Settings::v1(),
            Preset::V2 => Settings::v2(),
        };
        if let Some(bits) = self.code_bits {
            settings.code = CodeWidth::from_bits(bits)
                .map_err(|error| error.place(|refusal| refusal.field("--code-bits")))?;
        }
        if let Some(hi_frac) = self.hi_frac {
            if !(0.0..=1.0).contains(&hi_frac) {
                return refuse(format!("a share of {hi_frac}")).field("--hi-frac").wanted("0 to 1").err();
            }
            settings.hi_frac = hi_frac;
        }
        settings.feedback = self.feedback || (settings.feedback && !self.no_feedback);
        Ok(LinearCodec::Kaiju(settings))
    }

    fn importance(&self) -> Result<ImportanceFile> {
        match (&self.imatrix, &self.hessian) {
            (Some(imatrix), _) => Ok(ImportanceFile::Imatrix(imatrix.clone())),
            (None, Some(hessian)) => Ok(ImportanceFile::Hessian(hessian.clone())),
            (None, None) if self.flat_missing => {
                refuse("nothing can be missing without a file of importance")
                    .field("--flat-missing")
                    .wanted("--imatrix or --hessian beside it")
                    .err()
            }
            (None, None) => Ok(ImportanceFile::None),
        }
    }
}

/// Encodes and prints what was made.
///
/// # Errors
/// Whatever is wrong with input, output or arguments.
pub fn run(args: &EncodeArgs) -> Result<()> {
    let options = EncodeOptions {
        codec: args.linear_codec()?,
        tensors: args.tensor.clone(),
        importance: args.importance()?,
        flat_missing: args.flat_missing,
    };
    let bars = args.run.begin()?;
    if args.codec == CodecArg::Trellis {
        note_slow_search(&bars);
    }
    let report = encode(&args.input, &args.out, &options, &bars)?;
    args.run.print("encode", &report, || report.render_table())
}
