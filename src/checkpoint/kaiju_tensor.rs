//! The tensor of a KAIJU1 linear: `{module}.kaiju1`, U8 `[bytes]`, a payload of
//! [`codec::kaiju`](crate::codec::kaiju) in place of `{module}.weight` `[rows, cols]`.

use super::trellis_tensors::TensorReader;
use crate::codec::kaiju::{Header, KaijuTensor};
use crate::error::{Error, Result, refuse};
use crate::store::safetensors_write::TensorData;
use crate::store::tensor_dtype::TensorDtype;

/// Last part of the tensor's name.
pub const KAIJU_PART: &str = "kaiju1";

/// Name of a module's tensor.
pub fn kaiju_name(module: &str) -> String {
    format!("{module}.{KAIJU_PART}")
}

/// What a payload says of itself; the rest of it is not read, but is as long as the header says.
///
/// # Errors
/// Names file and tensor of another type or shape, of a header that is none, and of a payload of another length.
pub fn kaiju_header(tensors: &dyn TensorReader, name: &str) -> Result<Header> {
    let info = tensors.tensor_info(name)?;
    if info.dtype != TensorDtype::U8 || info.shape.len() != 1 {
        return refuse(format!("it is {} of shape {:?}", info.dtype, info.shape))
            .file(tensors.file_of(name))
            .tensor(name)
            .wanted("U8 of one dimension")
            .err();
    }
    let header = Header::parse(tensors.tensor_payload(name)?).map_err(|error| named(error, tensors, name))?;
    if info.shape[0] != header.payload_len() {
        return refuse(format!("the payload has {} bytes", info.shape[0]))
            .file(tensors.file_of(name))
            .tensor(name)
            .wanted(format!("{}, by its header", header.payload_len()))
            .err();
    }
    Ok(header)
}

/// Reads the linear and checks all of it.
///
/// # Errors
/// As [`kaiju_header`], and names the place of what is wrong in the payload.
pub fn read_kaiju(tensors: &dyn TensorReader, name: &str) -> Result<KaijuTensor> {
    kaiju_header(tensors, name)?;
    KaijuTensor::parse(tensors.tensor_payload(name)?.to_vec()).map_err(|error| named(error, tensors, name))
}

/// The linear as its module's tensor.
pub fn kaiju_data<'a>(module: &str, linear: &'a KaijuTensor) -> TensorData<'a> {
    let payload = linear.payload();
    TensorData::from_bytes(kaiju_name(module), TensorDtype::U8, &[payload.len()], payload)
}

fn named(error: Error, tensors: &dyn TensorReader, name: &str) -> Error {
    error.place(|refusal| refusal.file(tensors.file_of(name)).tensor(name))
}
